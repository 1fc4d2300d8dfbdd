"""Items are read in a thread before they are asked for, and come as they would have come."""

import itertools
import subprocess
import sys
import threading

import pytest

from t0repro.data.read_ahead import read_ahead


def threads():
    return [each for each in threading.enumerate() if each.name == "read ahead"]


def test_items_come_in_order_to_their_end():
    assert list(read_ahead(range(100), 3)) == list(range(100))
    assert list(read_ahead([])) == []
    assert not threads()


def test_so_many_are_read_before_they_are_asked_for_and_no_more():
    read, third = [], threading.Event()

    def items():
        for n in itertools.count():
            read.append(n)
            if n == 2:
                third.set()
            yield n

    ahead = read_ahead(items(), 2)
    assert next(ahead) == 0
    # The other thread reads two more without being asked.
    assert third.wait(10)
    assert next(ahead) == 1
    ahead.close()
    assert len(read) <= 4 and not threads()


def test_the_first_item_is_read_before_anything_is_asked_for():
    begun = threading.Event()
    ahead = read_ahead(begun.set() or n for n in range(3))
    assert begun.wait(10)
    # Nobody asks: dropping it ends the thread as well.
    del ahead
    assert not threads()


def test_an_error_is_raised_where_its_item_would_have_come():
    def items():
        yield 1
        raise OSError("the disk is gone")

    ahead = read_ahead(items())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert not threads()


def test_a_process_ends_in_silence_with_an_iterator_that_nobody_closed():
    # What the module of threads holds is dropped when that module has been taken apart.
    code = """
import itertools, threading
from t0repro.data.resuming import read_ahead
threading.kept = read_ahead(itertools.count())
print(next(threading.kept))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
