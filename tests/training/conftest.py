import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def compile_each_program_once(tmp_path_factory):
    """Trainers of one model compile one program; here they share what the first compiled."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("compiled")))
    jax.config.update(names[1], 0.2)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
