"""Recipes on real rows, to copy from: each module registers its tasks on import.

small: the demo's job; mixtures `small_train` and `small_eval_score_eval`.
learning: what scripts/small_texts.sh trains and ranks; `learning_train` and its evaluation.
topics: questions and news, for examples that train beside evaluations.
small_texts: pretraining on plain texts.
"""
