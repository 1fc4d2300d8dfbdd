"""Fetching the released P3: whole after errors, cuts and kills, and read by SeqIO as a cache."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import seqio
import tensorflow as tf

from t0repro.errors import UserError
from t0repro.hub_files import HubRepository
from t0repro.storage import lock_folder
from t0repro.tasks import p3
from t0repro.tasks.prompt_cache.provenance import P3_SOURCE
from t0repro.tasks.prompt_cache.records import count_records, read_records

from . import p3_server

TASK = "super_glue_rte_GPT_3_style"
TWIN = TASK + "_score_eval"
RECORD = "train.tfrecord-00000-of-00001"
ROWS = {"train": 40, "validation": 3, "test": 2}


def text_feature(text: str) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))


def write_task(folder: Path, twin: bool) -> None:
    """A task's cache with the features that P3's have, one shard a split."""
    folder.mkdir(parents=True)
    tokens, text = {"dtype": "int32", "shape": [None]}, {"dtype": "string", "shape": []}
    features = {"inputs": tokens, "inputs_pretokenized": text}
    features |= {"targets": tokens, "targets_pretokenized": text}
    if twin:
        features["idx"] = {"dtype": "int32", "shape": [None]}
        features["is_correct"] = {"dtype": "bool", "shape": []}
        features["weight"] = {"dtype": "float32", "shape": []}
    else:
        features["answer_choices"] = {"dtype": "string", "shape": [None]}
    for split, count in ROWS.items():
        with tf.io.TFRecordWriter(str(folder / f"{split}.tfrecord-00000-of-00001")) as writer:
            for number in range(count):
                writer.write(record(split, number, twin))
        info = {"features": features, "num_shards": 1, "seqio_version": "0.0.6"}
        (folder / f"info.{split}.json").write_text(json.dumps(info))
        (folder / f"stats.{split}.json").write_text(json.dumps({"examples": count}))
    (folder / "COMPLETED").touch()


def record(split: str, number: int, twin: bool) -> bytes:
    def numbers(values: list[int]) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    feature = {
        "inputs": numbers([number + 3, 7]),
        "inputs_pretokenized": text_feature(f"{split} {number}"),
        "targets": numbers([10, 1]),
        "targets_pretokenized": text_feature("\nTrue"),
    }
    if twin:
        feature["idx"] = numbers([number // 2, number % 2])
        feature["is_correct"] = numbers([number % 2])
        feature["weight"] = tf.train.Feature(float_list=tf.train.FloatList(value=[1.0]))
    else:
        values = [b"True", b"False"]
        feature["answer_choices"] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    example = tf.train.Example(features=tf.train.Features(feature=feature))
    return example.SerializeToString()


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A P3 of one task and its twin."""
    root = tmp_path_factory.mktemp("hub")
    write_task(root / "data" / TASK, twin=False)
    write_task(root / "data" / TWIN, twin=True)
    return root


@pytest.fixture
def server(tree):
    with p3_server.serving(tree) as running:
        yield running


def repository(server, delays=(0.01, 0.01)) -> HubRepository:
    return HubRepository(server.url, p3.REPOSITORY, p3.REVISION, delays)


def assert_whole(folder: Path, tree: Path, task: str = TASK) -> None:
    names = {path.name for path in (tree / "data" / task).iterdir()}
    assert {path.name for path in (folder / task).iterdir()} == names | {P3_SOURCE}
    for name in names:
        assert (folder / task / name).read_bytes() == (tree / "data" / task / name).read_bytes()
    assert not (folder / p3.UNFINISHED).exists()


def test_chosen_tasks_are_fetched_as_they_are(server, tree, tmp_path):
    done = p3.fetch(["super_glue_rte_GPT*"], tmp_path, repository(server))
    assert done.fetched == [TASK, TWIN] and not done.present and not done.absent
    assert_whole(tmp_path, tree)
    assert_whole(tmp_path, tree, TWIN)
    source = json.loads((tmp_path / TASK / P3_SOURCE).read_text())
    assert source["revision"] == p3.REVISION and source["records"][RECORD] == 40


def test_a_mirrors_password_is_used_and_recorded_nowhere(server, tree, tmp_path):
    address = server.url.replace("http://", "http://user:s3cr3t@")
    mirror = HubRepository(address, p3.REPOSITORY, p3.REVISION)
    p3.fetch(["super_glue_rte_GPT*"], tmp_path, mirror)
    assert_whole(tmp_path, tree)
    assert mirror._session.auth == ("user", "s3cr3t")
    assert not [path for path in tmp_path.rglob("*.json") if "s3cr3t" in path.read_text()]


def test_the_hub_is_shown_ones_token_and_a_mirror_is_not(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "mine")
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/")
    HubRepository(server.url, p3.REPOSITORY, "main").files(TASK)
    server.listing_faults = [401]
    with pytest.raises(UserError, match=r"401(.|\n)*datasets/bigscience/P3, and set HF_TOKEN"):
        HubRepository(server.url, p3.REPOSITORY, "main").files(TASK)
    monkeypatch.delenv("HF_ENDPOINT")
    HubRepository(server.url, p3.REPOSITORY, "main").files(TASK)
    assert "Bearer mine" in server.tokens and server.tokens[-1] is None


def test_seqio_reads_a_fetched_task_as_its_cache(server, tmp_path, monkeypatch):
    from t0repro.tasks.registration import add_prompted_task

    p3.fetch([TASK, TWIN], tmp_path, repository(server))
    # The task by T0's name; its rows are not asked for.
    if TASK not in seqio.TaskRegistry.names():
        add_prompted_task("super_glue", "rte", "GPT-3 style", ["train", "validation"])
    seqio.add_global_cache_dirs([str(tmp_path)])
    try:
        for name in (TASK, TWIN):
            task = seqio.TaskRegistry.get(name)
            monkeypatch.setattr(task, "_cache_dir", None)
            monkeypatch.setattr(task, "_stats", {})
            read = task.get_dataset(None, "validation", use_cached=True, shuffle=False)
            examples = list(read.as_numpy_iterator())
            assert [example["inputs"].tolist() for example in examples] == [[3, 7], [4, 7], [5, 7]]
            assert task.get_cached_stats("train")["examples"] == 40
            assert examples[0]["inputs_pretokenized"] == b"validation 0"
        assert examples[1]["idx"].tolist() == [0, 1] and examples[1]["is_correct"] is np.True_
    finally:
        seqio.set_global_cache_dirs([])


def test_servers_errors_pass(server, tree, tmp_path):
    server.listing_faults = [503]
    server.faults = [500, 502, None, 429]
    # Before anything came a 503 is an answer all the same: the hub is there.
    p3.fetch([TASK], tmp_path, repository(server))
    assert_whole(tmp_path, tree)


def test_a_server_that_only_fails_ends_the_fetch_and_keeps_what_came(server, tree, tmp_path):
    server.faults = [None, None, None, *[500] * 3]
    with pytest.raises(UserError, match="500"):
        p3.fetch([TASK], tmp_path, repository(server))
    assert not (tmp_path / TASK).exists()
    asked = len(server.asked)
    p3.fetch([TASK], tmp_path, repository(server))
    assert_whole(tmp_path, tree)
    again = [name for name, _ in server.asked[asked:]]
    assert len(again) == 9 - 3 and not set(again) & {name for name, _ in server.asked[:3]}


def test_a_cut_transfer_goes_on_at_its_byte(server, tree, tmp_path):
    size = (tree / "data" / TASK / RECORD).stat().st_size
    # Files come in the listing's order: six small ones, test, train, validation.
    server.faults = [None] * 7 + [("cut", 1000), ("cut", 500)]
    p3.fetch([TASK], tmp_path, repository(server))
    assert_whole(tmp_path, tree)
    ranges = [asked for name, asked in server.asked if name == RECORD]
    assert ranges == ["", "bytes=1000-", "bytes=1500-"] and size > 1500


def test_a_server_without_range_sends_the_file_again(server, tree, tmp_path):
    server.faults = [None] * 7 + [("cut", 1000), "whole"]
    p3.fetch([TASK], tmp_path, repository(server))
    assert_whole(tmp_path, tree)


def test_a_transfer_that_never_gets_on_is_an_error_with_its_byte(server, tmp_path):
    server.faults = [None] * 7 + [("cut", 1000)] + [("cut", 0)] * 9
    with pytest.raises(UserError, match="at byte 1,000 of"):
        p3.fetch([TASK], tmp_path, repository(server))
    assert (tmp_path / p3.UNFINISHED / TASK / RECORD).stat().st_size == 1000


@pytest.mark.parametrize("large", [True, False])
def test_wrong_bytes_are_fetched_again_and_never_kept(server, tree, tmp_path, large):
    server.large = large  # SHA-256 of large files, Git's SHA-1 of the others
    server.faults = [None] * 7 + ["wrong"]
    p3.fetch([TASK], tmp_path / "once", repository(server))
    assert_whole(tmp_path / "once", tree)
    server.faults = [None] * 7 + ["wrong", "wrong"]
    with pytest.raises(UserError, match=f"twice(.|\n)*{RECORD}"):
        p3.fetch([TASK], tmp_path / "twice", repository(server))
    assert not (tmp_path / "twice" / TASK).exists()
    assert not (tmp_path / "twice" / p3.UNFINISHED / TASK / RECORD).exists()


@pytest.mark.parametrize("fault", ["endless", "huge"])
def test_what_comes_after_a_files_listed_bytes_is_not_read(server, tree, tmp_path, fault):
    server.faults = [None] * 7 + [fault]
    p3.fetch([TASK], tmp_path, repository(server))
    assert_whole(tmp_path, tree)
    assert server.sent_too_much < 64 << 20


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://127.0.0.1:9/x", "nowhere://x"])
def test_a_server_that_sends_one_on_to_what_is_no_web_address_is_refused(server, tmp_path, address):
    server.faults = [None] * 7 + [("moved", address)] * 9
    with pytest.raises(UserError, match="redirects to") as caught:
        p3.fetch([TASK], tmp_path, repository(server))
    assert address in caught.value.what and RECORD in str(caught.value.where)
    assert not (tmp_path / TASK).exists()


def test_a_wrong_beginning_on_disk_is_found_and_fetched_anew(server, tree, tmp_path):
    part = tmp_path / p3.UNFINISHED / TASK
    part.mkdir(parents=True)
    (part / RECORD).write_bytes(b"of another file")
    (part / "info.train.json").write_bytes(b"x" * 100_000)
    (part / "left over").touch()
    p3.fetch([TASK], tmp_path, repository(server))
    assert_whole(tmp_path, tree)


def test_records_with_a_wrong_checksum_are_named_with_their_byte(tree, tmp_path):
    good = tree / "data" / TASK / RECORD
    assert count_records(good) == len(list(read_records(good))) == 40
    data = bytearray(good.read_bytes())
    data[20] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    with pytest.raises(UserError, match=r"flipped, byte 0"):
        list(read_records(tmp_path / "flipped"))
    (tmp_path / "cut").write_bytes(good.read_bytes()[:-3])
    for read in (read_records, count_records):
        with pytest.raises(UserError, match=r"cut, byte \d{3,}"):
            list(read(tmp_path / "cut"))


def test_a_hub_whose_own_records_are_broken_leaves_no_whole_task(tree, tmp_path):
    root = tmp_path / "hub"
    shutil.copytree(tree, root)
    with open(root / "data" / TASK / RECORD, "r+b") as file:
        file.seek(30)
        file.write(b"\0\1\2")
    with p3_server.serving(root) as server, pytest.raises(UserError, match="record"):
        p3.fetch([TASK], tmp_path / "to", repository(server))
    assert not (tmp_path / "to" / TASK).exists()


def test_without_network_it_says_so_at_once(tree, tmp_path):
    with p3_server.serving(tree) as server:
        gone = repository(server, delays=(1000.0,))  # waiting would outlast any test
    with pytest.raises(UserError, match="cannot be reached(.|\n)*HF_ENDPOINT"):
        p3.fetch([TASK], tmp_path, gone)


def test_tasks_that_are_there_need_no_network(server, tree, tmp_path):
    p3.fetch([TASK], tmp_path, repository(server))
    server.listing_faults = [404]
    done = p3.fetch([TASK], tmp_path, repository(server))
    assert (done.fetched, done.present) == ([], [TASK]) and server.listing_faults == [404]
    assert_whole(tmp_path, tree)


def test_what_p3_does_not_hold_is_told_and_the_rest_fetched(server, tree, tmp_path):
    patterns = ["super_glue_rte_GPT*", "super_glue_cb_can_we_infer"]
    done = p3.fetch(patterns, tmp_path, repository(server))
    assert done.absent == ["super_glue_cb_can_we_infer"] and done.fetched == [TASK, TWIN]
    with pytest.raises(UserError, match="P3 does not hold"):
        p3.fetch(["super_glue_cb_can_we_infer"], tmp_path, repository(server))


def test_a_pattern_that_matches_nothing_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match="super_glue_rte_GPT_3_style"):
        p3.match_names(["super_glue_rte_GPT3_style*"])
    with pytest.raises(UserError, match="No task is named"):
        p3.match_names([])


def test_every_name_of_p3s_counts_is_known():
    from t0repro.tasks.catalog import p3_sizes

    assert set(p3_sizes()) <= set(p3.known_names())
    assert p3_sizes()["trec_fine_grained_ABBR"] == {"train": 86, "test": 9}


@pytest.mark.parametrize(
    "answer", [b"<html>a portal</html>", b'{"error": 1}', b'[{"type": "file"}]']
)
def test_an_answer_that_is_no_listing_is_told(server, tmp_path, answer):
    server.listing_faults = [answer]
    with pytest.raises(UserError, match="listing(.|\n)*--base_url"):
        p3.fetch([TASK], tmp_path, repository(server))


@pytest.mark.parametrize("missing", ["COMPLETED", "info.train.json", "stats.test.json"])
def test_a_listing_that_is_no_whole_cache_is_refused(tree, tmp_path, missing):
    root = tmp_path / "hub"
    shutil.copytree(tree, root)
    (root / "data" / TASK / missing).unlink()
    with p3_server.serving(root) as server, pytest.raises(UserError, match=missing):
        p3.fetch([TASK], tmp_path / "to", repository(server))


def test_a_folder_of_the_name_without_marker_is_not_touched(server, tmp_path):
    (tmp_path / TASK).mkdir()
    (tmp_path / TASK / "mine.txt").touch()
    with pytest.raises(UserError, match="without the marker"):
        p3.fetch([TASK], tmp_path, repository(server))
    assert (tmp_path / TASK / "mine.txt").exists()


def test_a_file_where_the_folder_should_be_is_told(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        p3.fetch([TASK], tmp_path / "file", repository(server))


@pytest.mark.parametrize(
    ("following", "message"),
    [
        ("{url}/api/datasets/bigscience/P3/tree/{revision}/data/{task}", "read already"),
        ("?cursor=0", "read already"),
        ("http://127.0.0.1:9/api/datasets/bigscience/P3/tree/main/data", "on another server"),
    ],
)
def test_a_listing_whose_next_page_is_itself_or_elsewhere_is_refused(
    tree, tmp_path, following, message
):
    with p3_server.serving(tree) as server:
        server.next_page = following.format(url=server.url, revision=p3.REVISION, task=TASK)
        with pytest.raises(UserError, match=f"listing cannot be followed(.|\n)*{message}"):
            p3.fetch([TASK], tmp_path, repository(server))
        assert server.listings <= 2


def test_two_fetches_to_one_folder_are_told_apart(server, tmp_path):
    with lock_folder(tmp_path, "test"), pytest.raises(UserError, match="Another run holds"):
        p3.fetch([TASK], tmp_path, repository(server))


def test_a_killed_fetch_leaves_nothing_whole_and_goes_on(server, tree, tmp_path):
    to = tmp_path / "to"
    # The train file breaks off after 1,000 bytes and the next attempt is far away: killed there.
    server.faults = [None] * 7 + [("cut", 1000)]
    code = (
        "import sys; from pathlib import Path; from t0repro.tasks import p3\n"
        "from t0repro.hub_files import HubRepository\n"
        f"hub = HubRepository({server.url!r}, p3.REPOSITORY, p3.REVISION, (600.0,))\n"
        f"p3.fetch([{TASK!r}], Path({str(to)!r}), hub)\n"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", code])
    part = to / p3.UNFINISHED / TASK / RECORD
    deadline = time.monotonic() + 120
    while not (part.is_file() and part.stat().st_size == 1000) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert part.stat().st_size == 1000 and not (to / TASK).exists()
    asked = len(server.asked)
    p3.fetch([TASK], to, repository(server))
    assert_whole(to, tree)
    assert server.asked[asked] == (RECORD, "bytes=1000-")


def test_too_little_room_is_told_before_anything_is_fetched(server, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(small)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with pytest.raises(UserError, match="are free"):
            p3.fetch([TASK], small, repository(server))
        assert server.asked == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
