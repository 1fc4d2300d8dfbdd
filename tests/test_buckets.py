"""Buckets: objects, leases and working copies, on fsspec's memory and on loopback servers."""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest

from t0repro import storage
from t0repro.cloud.vertex.results import copy_results
from t0repro.errors import UserError
from t0repro.hub_files import HubFile
from t0repro.progress import heard_by
from t0repro.reports.make_report import make_report
from t0repro.reports.run import Run, find_evaluation
from t0repro.storage import (
    buckets,
    input_path,
    leases,
    lock_folder,
    output_path,
    stores,
    working_copies,
    write_atomically,
)
from t0repro.storage.working_copies import WorkingCopy

from .reports.suites import small_suite


def test_objects_are_written_whole_listed_by_name_and_removed(bucket, tmp_path):
    assert not storage.exists(bucket) and buckets.objects(bucket) == {}
    buckets.write(f"{bucket}/b/c", b"12345")
    content = bytes(3_000_000) + b"\r\n\r\n"
    (tmp_path / "file").write_bytes(content)
    buckets.upload(tmp_path / "file", f"{bucket}/a")
    buckets.write(f"{bucket}2", b"of another folder")
    assert buckets.objects(bucket) == {"a": len(content), "b/c": 5}
    assert storage.exists(f"{bucket}/b") and buckets.read(f"{bucket}/b/c") == b"12345"
    buckets.write(f"{bucket}/b/c", b"6")
    buckets.download(f"{bucket}/b/c", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == b"6"
    assert buckets.read(f"{bucket}/a") == content
    buckets.remove(f"{bucket}/a")
    buckets.remove(f"{bucket}/a")  # which is gone
    storage.remove_all(bucket)
    assert buckets.objects(bucket) == {} and buckets.read(f"{bucket}2")
    with pytest.raises(FileNotFoundError):
        buckets.read(f"{bucket}/a")


def test_of_several_that_create_an_object_one_succeeds(bucket):
    won = []

    def create(number):
        if buckets.create(f"{bucket}/object", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and buckets.read(f"{bucket}/object") == str(won[0]).encode()


def test_a_folder_is_written_in_a_copy_and_begins_with_what_the_bucket_holds(bucket):
    folder = output_path(f"{bucket}/run")
    with lock_folder(folder, "writing"):
        write_atomically(folder / "below" / "first", "1")
        write_atomically(folder / "second", "2")
        storage.upload(f"{bucket}/run")
        assert {"below/first", "second"} <= buckets.objects(f"{bucket}/run").keys()
        (folder / "second").unlink()
    storage.close_copies()
    assert not folder.exists()
    again = output_path(f"{bucket}/run")
    with lock_folder(again, "writing"):
        assert (again / "below" / "first").read_text() == "1" and not (again / "second").exists()
        with open(again / "below" / "first", "a") as file:
            file.write("1")
    storage.close_copies()
    assert input_path(f"{bucket}/run/below/first").read_text() == "11"


def test_a_file_that_vouches_for_others_is_uploaded_after_them(bucket, monkeypatch):
    folder = output_path(f"{bucket}/cache")
    folder.mkdir()
    write_atomically(folder / "z_data", "data")
    write_atomically(folder / "COMPLETED", "marker")
    really = buckets.upload

    def cut(path, address):
        if path.name == "z_data":
            raise UserError("The store did not answer as it should.")
        really(path, address)

    monkeypatch.setattr(buckets, "upload", cut)
    with pytest.raises(UserError):
        storage.upload(f"{bucket}/cache")
    assert buckets.objects(f"{bucket}/cache") == {}
    monkeypatch.setattr(buckets, "upload", really)
    storage.upload(f"{bucket}/cache")
    assert buckets.objects(f"{bucket}/cache") == {"COMPLETED": 6, "z_data": 4}


def test_shards_of_a_cache_take_no_space_once_they_are_uploaded(bucket, tmp_path):
    folder, name = output_path(f"{bucket}/cache"), "train.tfrecord-00000-of-00001"
    folder.mkdir()
    write_atomically(folder / name, "records" * 1000)
    storage.close_copies()
    assert buckets.read(f"{bucket}/cache/{name}") == b"records" * 1000
    resumed = output_path(f"{bucket}/cache") / name
    assert resumed.stat().st_size == 7000 and resumed.stat().st_blocks == 0
    storage.close_copies()
    assert buckets.read(f"{bucket}/cache/{name}") == b"records" * 1000
    assert input_path(f"{bucket}/cache/{name}").read_bytes() == b"records" * 1000


def test_of_names_that_begin_with_a_dot_those_of_zarr_are_uploaded(bucket):
    copy = WorkingCopy(bucket, writes=True)
    for name in (
        ".zarray",
        "a/.zattrs",
        ".zarray.0123abcd.tmp",
        ".t0repro.lock",
        ".partial/.zgroup",
    ):
        write_atomically(copy.path / name, "x")
    copy.close()
    assert list(buckets.objects(bucket)) == [".zarray", "a/.zattrs"]


def test_rows_that_two_commands_append_to_one_file_are_all_kept(bucket):
    buckets.write(f"{bucket}/run/metrics.jsonl", b"0\n")
    copies = [WorkingCopy(f"{bucket}/run", writes=True) for _ in range(2)]
    for row, copy in zip("12", copies, strict=True):
        with open(copy.path / "metrics.jsonl", "a") as file:
            file.write(f"{row}\nhalf of")
    for copy in copies:
        copy.upload()
    with open(copies[0].path / "metrics.jsonl", "a") as file:
        file.write(" a row\n")
    copies[0].upload()
    assert buckets.read(f"{bucket}/run/metrics.jsonl") == b"0\n1\n2\nhalf of a row\n"
    # A run that starts again at an earlier step takes its later rows back.
    write_atomically(copies[0].path / "metrics.jsonl", "0\n")
    copies[0].upload()
    assert buckets.read(f"{bucket}/run/metrics.jsonl") == b"0\n"
    (copies[1].path / "metrics.jsonl").write_text("0\n")
    for copy in copies:
        copy.close()


def test_the_copy_of_a_killed_process_is_removed_by_the_next(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = WorkingCopy(f"{bucket}/run", writes=False)
    killed = WorkingCopy(f"{bucket}/run", writes=False)
    killed._scratch._in_use.release()  # as the system does
    monkeypatch.setattr(working_copies, "_SECONDS_TO_BEGIN", -1.0)
    WorkingCopy(f"{bucket}/run", writes=False).close()
    assert [path.name for path in tmp_path.iterdir()] == [living.path.parents[1].name]
    living.close()
    assert not any(tmp_path.iterdir())


# ---- Leases --------------------------------------------------------------------------------------


def held(address):
    return leases.hold(address, "training", fix="Wait.")


def owner_of(address):
    numbers = buckets.objects(f"{address}/{leases.LEASES}")
    return f"{address}/{leases.LEASES}/{max(numbers)}"


def change_owner(address, **changes):
    holder = json.loads(buckets.read(owner_of(address)))
    buckets.write(owner_of(address), json.dumps({**holder, **changes}).encode())


def test_a_live_owner_keeps_its_lease_and_a_released_one_is_free(bucket):
    with held(bucket):
        with pytest.raises(UserError, match="Another run holds this address for training"):
            held(bucket).__enter__()
    with held(bucket):
        pass


def test_a_renewal_on_its_way_does_not_take_a_released_lease_back(bucket, monkeypatch):
    monkeypatch.setattr(leases, "_SECONDS_BETWEEN_RENEWALS", 0.01)
    on_its_way, arrives, write = threading.Event(), threading.Event(), buckets.write

    def slow_write(name, content):
        if threading.current_thread() is not releasing:
            on_its_way.set()
            arrives.wait()
        write(name, content)

    with held(bucket) as lease:
        releasing = threading.Thread(target=lease.release)
        monkeypatch.setattr(buckets, "write", slow_write)
        assert on_its_way.wait(10)
        releasing.start()
        releasing.join(0.2)
        arrives.set()
        releasing.join()
        monkeypatch.setattr(buckets, "write", write)
        time.sleep(0.1)
        assert json.loads(buckets.read(owner_of(bucket)))["released"]


def test_a_dead_owner_of_this_machine_is_followed_at_once(bucket):
    with held(bucket):
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        change_owner(bucket, process=ended.pid)
        with held(bucket) as lease:
            lease.check()


@pytest.mark.parametrize(
    "damaged", [b"", b"{", b"[]", b"null", b'{"released": "false"}', b'{"process": "x"}']
)
def test_a_damaged_lease_is_watched_before_it_is_followed(bucket, monkeypatch, damaged):
    monkeypatch.setattr(leases, "_SECONDS_TO_EXPIRE", 0.5)
    monkeypatch.setattr(leases, "_POLL_SECONDS", 0.1)
    with held(bucket):
        content = buckets.read(owner_of(bucket))
        buckets.write(owner_of(bucket), damaged)
        assert not leases.Lease(bucket, "removing").acquire_now()
        renewing = threading.Timer(0.2, buckets.write, [owner_of(bucket), content])
        renewing.start()
        with pytest.raises(UserError, match="Another run holds"):
            held(bucket).__enter__()
        buckets.write(owner_of(bucket), damaged)
        with held(bucket) as lease:
            lease.check()


def test_an_owner_elsewhere_is_watched_and_followed_only_if_it_does_not_renew(bucket, monkeypatch):
    monkeypatch.setattr(leases, "_SECONDS_TO_EXPIRE", 1.0)
    monkeypatch.setattr(leases, "_POLL_SECONDS", 0.2)
    said = []
    with held(bucket) as first:
        change_owner(bucket, machine="another", host="elsewhere")
        renewing = threading.Timer(0.3, change_owner, [bucket], {"beat": 99})
        renewing.start()
        with pytest.raises(UserError, match="elsewhere"):
            with heard_by(said.append):
                held(bucket).__enter__()
        with heard_by(said.append), held(bucket):
            # The first owner notices, and does not give back what is no longer its own.
            with pytest.raises(UserError, match="Another run took over"):
                first.check()
            first.release()
            with pytest.raises(UserError, match="Another run holds"):
                held(bucket).__enter__()
    assert "waiting up to 1 s to see whether" in said[0]


def test_a_run_that_lost_its_lease_uploads_nothing_more(bucket):
    folder = output_path(f"{bucket}/run")
    with pytest.raises(UserError, match="Another run took over"):
        with lock_folder(folder, "training"):
            number = int(owner_of(f"{bucket}/run").rpartition("/")[2])
            buckets.write(f"{bucket}/run/{leases.LEASES}/{number + 1:08d}", b"{}")
            write_atomically(folder / "metrics.jsonl", "a row")
            storage.upload(f"{bucket}/run")
    assert not storage.exists(f"{bucket}/run/metrics.jsonl")


@pytest.mark.parametrize("address", ["hdfs://a/b", "foo://a/b", "az://a/b"])
def test_an_unknown_scheme_is_named(address):
    with pytest.raises(UserError, match=f"{address[:3]}.*is not a known scheme") as error:
        output_path(address, "--out")
    assert error.value.where == "--out"


def test_a_report_names_the_address_of_its_evaluation_and_is_read_back_from_there(bucket, tmp_path):
    evaluation = small_suite(tmp_path / "local")
    address = f"{bucket}/run/validation_eval"
    for path in evaluation.folder.iterdir():
        buckets.upload(path, f"{address}/{path.name}")
    buckets.write(f"{bucket}/run/operative_config.gin", b"# The training run's.")
    report = make_report(Run("jax", input_path(address)), evaluation.prompts)
    assert report.provenance.eval_dir == address
    assert report.provenance.operative_config == "# The training run's."
    (tmp_path / "report.json").write_text(report.to_json())
    folder, step = find_evaluation(tmp_path / "report.json")
    assert step == report.provenance.step
    assert {path.name for path in folder.iterdir()} == {p.name for p in evaluation.folder.iterdir()}


@pytest.mark.parametrize(
    ("address", "variable", "store"),
    [
        ("gs://bucket/object", "STORAGE_EMULATOR_HOST", "Google Cloud Storage"),
        ("s3://bucket/object", "AWS_ENDPOINT_URL", "S3"),
    ],
)
def test_an_unreachable_store_is_named_within_seconds(monkeypatch, address, variable, store):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv(variable, f"http://127.0.0.1:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    stores.file_system.cache_clear()
    begin = time.monotonic()
    with pytest.raises(UserError, match=f"{store} cannot be reached") as error:
        storage.exists(address)
    assert time.monotonic() - begin < 5  # asked in vain: gcsfs 39 s, s3fs 7 to 13 s
    assert error.value.where == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("name", ["../evil", "a/../../evil"])
def test_a_listed_name_outside_its_folder_is_refused(monkeypatch, tmp_path, name):
    listed = {f"b/x/{name}": {"size": 1, "type": "file"}}
    system = SimpleNamespace(_strip_protocol=lambda path: "b/x", find=lambda path, detail: listed)
    monkeypatch.setattr(buckets, "store_of", lambda address: system)
    with pytest.raises(UserError, match="not below its folder"):
        buckets.objects("s3://b/x")
    with pytest.raises(UserError, match="not below its folder"):
        HubFile(name, 1)
    blob = SimpleNamespace(name=f"x/{name}/report.json", download_as_bytes=lambda: b"{}")
    client = SimpleNamespace(list_blobs=lambda bucket, prefix: [blob])
    with pytest.raises(UserError, match="not below its folder"):
        copy_results(client, "gs://b/x", tmp_path / "copy")
    assert not list(tmp_path.rglob("*.json"))
