"""Templates of random expressions; run as a program, prints what each renders to, as JSON."""

import itertools
import json
import random

from t0repro.tasks.rendering import compiled
from t0repro.tasks.templates import make_template

COUNT = 300
ROW = {"text": "a b c d e f", "label": 1, "words": list("abcdefgh"), "more": {"x": 1, "y": 2}}
VALUES = """text words more label more.keys() text.split() range(5) text.upper words.index
    cycler('p','q') joiner() namespace(a=1) dict(b=2,a=1) lipsum '%s'%text loop self more.items()
    [1,2.5,none,true] more['items'] {words.index:1}""".split()
FILTERS = """random choice list map('upper') select reject batch(2) slice(2) unique reverse items
    join string tojson pprint first last groupby(0) dictsort sort length xmlattr urlize escape
    map('random') most_frequent truncate(9) wordwrap(3) attr('upper') map(attribute='upper')
    format(text)""".split()
OPERATIONS = ["-", "~", "+", "%", "==", "in", "*"]


class Plain:
    """A template that is not the user's own, rendered in this process."""

    def __init__(self, jinja, answer_choices=None):
        self.name, self.jinja, self.answer_choices = "plain", jinja, answer_choices


def own(jinja, answer_choices=None):
    """A template of the user's own, rendered in the sandbox."""
    return make_template("mine", jinja, answer_choices, {}, identifier="mine", reference="")


def rendered(template, row=ROW, key="task/train/0"):
    """What one row renders to."""
    return compiled(template).render(row, key)


def generated(count):
    """So many templates of random expressions."""
    draw = random.Random("templates")
    for _ in range(count):
        expression = draw.choice(VALUES)
        for _ in range(draw.randint(0, 3)):
            if draw.random() < 0.3:
                expression = f"({expression} {draw.choice(OPERATIONS)} {draw.choice(VALUES)})"
            else:
                expression = f"({expression} | {draw.choice(FILTERS)})"
        yield f"{{{{ {expression} }}}} ||| {{{{ text }}}}"


def outcomes():
    """Each generated template with what it renders to, or the kind of error that it raises."""
    for kind, jinja in itertools.product((Plain, own), generated(COUNT)):
        try:
            yield jinja, repr(rendered(kind(jinja)))
        except Exception as error:
            yield jinja, type(error).__name__


if __name__ == "__main__":
    print(json.dumps(list(outcomes())))
