"""A process that JAX aborts, since another one has ended, first says which it was."""

import subprocess
import sys

PROGRAM = """
import ctypes, os, signal, socket, sys, threading, time
from t0repro.partitioning.watch import Watch

server = socket.create_server(("127.0.0.1", 0))
said = [server.getsockname()[1], "00" * 16]  # by the first process: its port and the run's token
Watch(1, 2, "127.0.0.1", lambda _: said)
first, _ = server.accept()
# As JAX does when its own connection breaks, outside of Python.
threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
time.sleep(0.5)
if sys.argv[1] == "dies":
    first.close()
time.sleep(60)
"""


def ended(first):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, first], capture_output=True, text=True, timeout=50
    )
    return done.returncode, done.stderr


def test_the_news_that_another_process_has_ended_comes_before_an_abort():
    code, said = ended("dies")
    assert code == 1 and said.startswith("Process 0 of 2 on 127.0.0.1 has ended")


def test_without_news_an_abort_is_one():
    assert ended("lives") == (-6, "")
