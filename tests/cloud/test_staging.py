"""Gin files reach the container whatever their names, with what they include."""

import pytest

from t0repro.cloud.vertex.command_line import read_arguments
from t0repro.cloud.vertex.staging import new_folder, stage
from t0repro.errors import UserError

FOLDER = "gs://b/t0repro/job"


def staged(*words):
    return stage(read_arguments(words), FOLDER)


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_two_files_of_one_name_stay_two(tmp_path):
    one, two = write(tmp_path / "a/run.gin", "A = 1"), write(tmp_path / "b/run.gin", "A = 2")
    found = staged("--run_mode=train", f"--gin_file={one}", "--gin_file", str(two), "--gin.A=3")
    assert found.files == {"gin/0-run.gin": b"A = 1", "gin/1-run.gin": b"A = 2"}
    mount = "/gcs/b/t0repro/job/gin"
    assert found.arguments == (
        "--run_mode=train", f"--gin_file={mount}/0-run.gin", "--gin_file", f"{mount}/1-run.gin",
        "--gin.A=3",
    )  # fmt: skip


def test_no_two_jobs_share_a_folder():
    folders = {new_folder("gs://b", "my job") for _ in range(50)}
    assert len(folders) == 50
    assert all(folder.startswith("gs://b/t0repro/my-job-") for folder in folders)


def test_files_of_the_image_and_of_buckets_are_not_copied():
    found = staged(
        "--run_mode=train", "--gin_file=t5x/configs/runs/pretrain.gin", "--gin_file=gs://c/x.gin"
    )
    assert found.files == {}
    assert found.arguments[1:] == (
        "--gin_file=t5x/configs/runs/pretrain.gin", "--gin_file=/gcs/c/x.gin",
    )  # fmt: skip


def test_included_files_come_along_under_the_names_by_which_they_are_included(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run.gin", "include 'parts/a.gin'\ninclude 't5x/configs/runs/pretrain.gin'")
    write(tmp_path / "parts/a.gin", "include 'parts/b.gin'")
    write(tmp_path / "more/parts/b.gin", "B = 1")
    found = staged("--run_mode=train", "--gin_file=run.gin", "--gin_search_paths=more")
    assert sorted(found.files) == ["gin/0-run.gin", "include/parts/a.gin", "include/parts/b.gin"]
    assert found.arguments[-1] == "--gin_search_paths=/gcs/b/t0repro/job/include,more"


def test_the_commands_of_t0_take_their_own_flag_for_included_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.gin", "include 'b.gin'")
    write(tmp_path / "b.gin")
    write(tmp_path / "more/c.gin")
    words = ("--backend=mtf", "--gin_file=a.gin", "--gin_file=c.gin")
    found = staged("t5_mesh_transformer", *words, "--gin_location_prefix=/gcs/b/other,more")
    # Of two flags with folders, t5's command reads the last.
    assert found.arguments[1:] == (
        "--gin_file=/gcs/b/t0repro/job/gin/0-a.gin",
        "--gin_file=/gcs/b/t0repro/job/gin/1-c.gin",
        "--gin_location_prefix=/gcs/b/other,more",
        "--gin_location_prefix=/gcs/b/t0repro/job/include,/gcs/b/other,more",
    )


def test_the_gin_file_of_auxiliary_jobs_comes_along(tmp_path):
    file = write(tmp_path / "eval.gin")
    found = staged("--run_mode=aux", f"--auxiliary_job_gin_file={file}")
    assert list(found.files) == ["gin/0-eval.gin"]
    assert found.arguments[1].endswith("=/gcs/b/t0repro/job/gin/0-eval.gin")


@pytest.mark.parametrize("climbs", [True, False])
def test_an_include_that_the_container_cannot_have_is_refused(tmp_path, monkeypatch, climbs):
    monkeypatch.chdir(write(tmp_path / "in/run.gin").parent)
    name = "../b.gin" if climbs else str(tmp_path / "b.gin")
    write(tmp_path / "b.gin")
    write(tmp_path / "in/run.gin", f"include '{name}'")
    with pytest.raises(UserError, match="container has no"):
        staged("--run_mode=train", "--gin_file=run.gin")
