"""Bucket addresses without credentials fail at once and say what to do; nothing asks a network."""

import dataclasses
import socket

import pytest

from t0repro.config.addresses import check_addresses
from t0repro.config.mtf import dialect
from t0repro.config.mtf.parser import MeshInputs, parse
from t0repro.errors import UserError
from t0repro.storage import access


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    """A machine that is not Google's, without credentials; a network call fails the test."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setattr(access, "_MACHINE", tmp_path / "product_name")

    def refuse(*args, **kwargs):
        raise AssertionError("a network connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path


def inputs(*gin_files, **changes):
    params = ("MIXTURE_NAME = 'demo_train'", "utils.run.mesh_shape = []", "run.train_steps = 2")
    return MeshInputs(
        "a_model_dir",
        ("dataset.gin", *gin_files),
        (*params, *changes.pop("params", ())),
        module_imports=("t0repro.tasks.demo",),
        **changes,
    )


@pytest.mark.mtf
@pytest.mark.parametrize("how", ["flag", "include"])
def test_a_gin_file_in_a_bucket_is_refused_with_what_to_do(no_credentials, how):
    address = "gs://a-bucket/small/operative_config.gin"
    file = address
    if how == "include":
        file = str(no_credentials / "mine.gin")
        (no_credentials / "mine.gin").write_text(f"include '{address}'\n")
    with pytest.raises(UserError, match="no Google Cloud credentials") as error:
        parse(inputs(file))
    assert address in str(error.value) and "gcloud auth" in str(error.value)


@pytest.mark.mtf
def test_a_checkpoint_a_cache_or_a_model_dir_in_a_bucket_is_refused_by_its_flag(no_credentials):
    with pytest.raises(UserError, match="gs://caches") as error:
        parse(inputs("models/t5.1.1.tiny.gin", cache_dirs=("gs://caches/all",)))
    assert error.value.where == "--additional_task_cache_dirs"
    params = ("run.init_checkpoint = 'gs://a-bucket/small/model.ckpt-1000000'",)
    run = dialect.load(inputs("models/t5.1.1.tiny.gin", params=params)).inputs
    with pytest.raises(UserError, match="model.ckpt-1000000") as error:
        check_addresses(run, jax=True)
    assert error.value.where == "run.init_checkpoint"
    with pytest.raises(UserError, match="gs://a-bucket/run") as error:
        check_addresses(dataclasses.replace(run, model_dir="gs://a-bucket/run"), jax=False)
    assert error.value.where == "--model_dir"


def test_any_of_the_usual_credentials_lets_an_address_pass(no_credentials, monkeypatch):
    assert not access.has_google_credentials()
    key = no_credentials / "key.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    with pytest.raises(UserError, match="which is not a file"):
        access.check_credentials("gs://a/b", None)
    key.write_text("{}")
    access.check_credentials("gs://a/b", None)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    (no_credentials / "gcloud").mkdir()
    (no_credentials / "gcloud" / "application_default_credentials.json").write_text("{}")
    assert access.has_google_credentials()


def test_a_machine_of_googles_needs_no_file(no_credentials):
    (no_credentials / "product_name").write_text("Google Compute Engine\n")
    assert access.has_google_credentials()


def test_a_local_path_is_never_refused(no_credentials):
    access.check_credentials("/tmp/model.ckpt-1", None)
