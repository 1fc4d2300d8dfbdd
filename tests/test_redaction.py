"""Passwords and tokens stay out of messages and records."""

import os
import subprocess
import sys

import pytest

from t0repro.cli.results import echo
from t0repro.errors import UserError
from t0repro.hub_files import Bucket, HubRepository
from t0repro.storage import lock_folder
from t0repro.storage.locks import COMMAND_FILE
from t0repro.words import is_secret, remove_passwords

SECRET = "pw-SECRET"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"http://user:{SECRET}@host/x", "http://***@host/x"),
        (f"http://user:a@{SECRET}@host:80/x", "http://***@host:80/x"),
        (f"see 'https://{SECRET}@host' and gs://b", "see 'https://***@host' and gs://b"),
        (f"postgresql://mlflow:{SECRET}@db/mlflow", "postgresql://***@db/mlflow"),
        (f"https://h/x?a=1&access_token={SECRET}&b=2", "https://h/x?a=1&access_token=***&b=2"),
        (f"https://h/x?X-Goog-Signature={SECRET}", "https://h/x?X-Goog-Signature=***"),
        (f"https://h/x?sv=1&sig={SECRET}&se=2", "https://h/x?sv=1&sig=***&se=2"),
        (
            f"https://h/x?X-Amz-Credential={SECRET}&X-Amz-Security-Token={SECRET}",
            "https://h/x?X-Amz-Credential=***&X-Amz-Security-Token=***",
        ),
        (f"https://h/x#access_token={SECRET}", "https://h/x#access_token=***"),
        (f"https://h/x?key={SECRET}", "https://h/x?key=***"),
        (f"env HF_TOKEN={SECRET} A=1 t0repro", "env HF_TOKEN=*** A=1 t0repro"),
        (f"env WANDB_API_KEY='{SECRET}' t0repro", "env WANDB_API_KEY=*** t0repro"),
        (f"env 'HF_TOKEN={SECRET} {SECRET}' t0repro", "env 'HF_TOKEN=***' t0repro"),
        (f'{{"a": "env \'HF_TOKEN={SECRET} x\' b"}}', '{"a": "env \'HF_TOKEN=***\' b"}'),
        (
            f'{{"a": "export PGPASSWORD={SECRET}", "b": 1}}',
            '{"a": "export PGPASSWORD=***", "b": 1}',
        ),
        (
            f"x --hf_token={SECRET} --api-key {SECRET} --out y",
            "x --hf_token=*** --api-key *** --out y",
        ),
        (
            "x --key_map=a --keys b --token --out y MAX_TOKENS=5 TOKENIZERS_PARALLELISM=0",
            "x --key_map=a --keys b --token --out y MAX_TOKENS=5 TOKENIZERS_PARALLELISM=0",
        ),
        ("MyModel.EOS_TOKEN=1, key='query'", "MyModel.EOS_TOKEN=1, key='query'"),
        ("https://host/name@v1 and s3://b/a@c", "https://host/name@v1 and s3://b/a@c"),
        ('{"a":"http://host","b":"me@host"}', '{"a":"http://host","b":"me@host"}'),
        ("mail me@host", "mail me@host"),
    ],
)
def test_an_addresss_password_is_left_out_and_all_else_stays(text, shown):
    assert remove_passwords(text) == shown


def test_no_message_shows_a_password(capsys):
    address = f"http://user:{SECRET}@host/x"
    error = UserError(f"{address} is wrong.", where=address, fix=f"Try {address}.")
    assert SECRET not in str(error) and str(error).count("http://***@host/x") == 3
    echo(f"reading {address} ...")
    assert capsys.readouterr().out == "reading http://***@host/x ...\n"


def test_a_servers_user_and_password_are_sent_and_never_part_of_its_address():
    for server in (
        HubRepository(f"http://us%40er:{SECRET}@host:80/mirror/", "a/b", "main"),
        Bucket(f"http://us%40er:{SECRET}@host:80/mirror/", "bucket"),
    ):
        assert server.base_url == "http://host:80/mirror"
        assert server._session.auth == ("us@er", SECRET)
    assert HubRepository("https://host", "a/b", "main")._session.auth is None


def test_the_record_of_a_locks_holder_has_no_password(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["t0repro", f"--base_url=http://u:{SECRET}@host"])
    with lock_folder(tmp_path, "fetching"):
        assert "http://***@host" in (text := (tmp_path / COMMAND_FILE).read_text())
        assert SECRET not in text


@pytest.mark.parametrize(
    ("names", "secret"),
    [
        ("HF_TOKEN AWS_SECRET_ACCESS_KEY WANDB_API_KEY PGPASSWORD SSH_KEY DB_PWD token", True),
        ("GOOGLE_APPLICATION_CREDENTIALS GITHUB_TOKEN_FILE OPENAI_APIKEY PASSPHRASE", True),
        ("XLA_FLAGS CUDA_VISIBLE_DEVICES MAX_TOKENS TOKENIZERS_PARALLELISM KEYBOARD PWD", False),
    ],
)
def test_a_variables_name_says_whether_it_is_a_secret(names, secret):
    assert all(is_secret(name, "value") is secret for name in names.split())


def test_a_password_in_a_variables_value_makes_it_a_secret():
    assert is_secret("MLFLOW_TRACKING_URI", f"http://u:{SECRET}@host")
    assert not is_secret("MLFLOW_TRACKING_URI", "http://host")


TRACEBACKS = f"""
import os, sys, threading
from t0repro.cli.gate import gate
def fail():
    raise ValueError("no http://user:{SECRET}@host with " + os.environ["HF_TOKEN"]) from OSError(
        "https://h/x?token={SECRET}\\x1b[31m"
    )
with gate("it", show_unexpected=True) as settings:
    settings.debug = "debug" in sys.argv
    if "thread" in sys.argv:
        (thread := threading.Thread(target=fail)).start()
        thread.join()
    else:
        fail()
"""


@pytest.mark.parametrize("kind", ["debug", "unexpected", "thread"])
def test_no_traceback_shows_a_secret(kind, tmp_path):
    (tmp_path / "it.py").write_text(TRACEBACKS)  # whose lines, which are quoted, hold it as well
    ended = subprocess.run(
        [sys.executable, "-P", str(tmp_path / "it.py"), kind],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_TOKEN": "hf_0123456789"},
    )
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert "ValueError: no http://***@host with ***" in ended.stderr
    assert SECRET not in ended.stderr + ended.stdout and "\x1b" not in ended.stderr
