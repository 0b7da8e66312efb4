"""`ifbbench calibrate`: its files, its errors, and simulated runs with the calibrated profile."""

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.hardware import load_hardware, write_profile
from ifbbench.simulated.step_work import StepWork
from ifbbench.studies.calibrate import calibrate, print_calibration
from ifbbench.studies.calibration import Calibration
from ifbbench.studies.fit import Point

SMALL: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 512, "max_seq_len": 1024}


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["calibrate", *arguments])


def test_a_calibrated_profile_simulates_the_schedule_of_a_real_run(tmp_path):
    profile = tmp_path / "here.toml"
    limits = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    done = invoke("--device", "cpu", "--quick", "--output", str(profile), *limits)
    assert done.exit_code == 0, done.output
    assert f"sim:{profile}" in done.output
    assert "Attention of generation" in done.output
    assert profile.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    hardware = load_hardware(str(profile))
    assert hardware.calibration["model"] == "tiny"
    assert hardware.calibration["iterations"] > 50

    summaries = {}
    for device in ("cpu", f"sim:{profile}"):
        config = RunConfig(
            device=device, output=str(tmp_path / "run"), overwrite=True, time_scale=0, max_num_samples=12, **SMALL
        )
        summaries[device] = run_trace("default", config).summary
    real, simulated = summaries.values()
    assert real["schedule_digest"] == simulated["schedule_digest"]
    assert real["requests"]["completed"] == 12
    assert simulated["duration_s"] > 0


@pytest.mark.parametrize(("predicted_s", "warns"), [(0.0105, False), (0.013, True)])
def test_predictions_that_are_far_off_come_with_a_warning(tmp_path, predicted_s, warns):
    point = Point(StepWork.of_lengths([(0, 16, True)]), seconds=0.01, loop_s=0.001, samples=3)
    hardware = dataclasses.replace(load_hardware("cpu"), peak_flops={"float32": 1e11})
    printed = io.StringIO()
    found = Calibration(tmp_path / "here.toml", hardware, [point], np.array([predicted_s]))
    print_calibration(found, Console(file=printed, width=120))
    output = printed.getvalue()
    assert "Start of context" in output
    assert ("measure again" in output) is warns


def test_a_profile_is_read_as_it_was_written(tmp_path):
    base = load_hardware("cpu")
    path = tmp_path / "mine.toml"
    mine = dataclasses.replace(
        base,
        name="mine",
        title='A "machine"',
        host_iteration_s=1.2345e-4,
        peak_flops={"float32": 1.25e11},
        constants=dataclasses.replace(base.constants, matmul=0.125, launch_s=0.0, kernel_s=3e-5),
        calibration={"model": "tiny", "median_error": 0.0625, "points": 12},
    )
    write_profile(mine, path, "A remark.")
    assert path.read_text(encoding="utf-8").startswith("# A remark.\n")
    read = load_hardware(str(path))
    assert dataclasses.replace(read, host_iteration_s=0.0) == dataclasses.replace(mine, host_iteration_s=0.0)
    assert read.host_iteration_s == pytest.approx(1.2345e-4, rel=1e-3)


@pytest.mark.parametrize("device", ["null", "sim:h100-sxm"])
def test_a_device_that_computes_nothing_is_refused(device):
    done = invoke("--device", device)
    assert done.exit_code == 2
    assert f"--device: {device} computes nothing" in done.output


def test_a_missing_gpu_is_one_line(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = invoke("--device", "cuda", "--output", str(tmp_path / "gpu.toml"))
    assert done.exit_code == 2
    assert "no CUDA device" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["here.toml", "here.png"])
def test_what_exists_is_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine")
    done = invoke("--device", "cpu", "--output", str(tmp_path / "here.toml"))
    assert done.exit_code == 2
    assert f"{name}: already exists; add --overwrite" in done.output
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(("name", "message"), [("here.txt", "ends in .toml"), ("nowhere/here.toml", "no directory")])
def test_a_bad_output_is_refused(tmp_path, name, message):
    done = invoke("--device", "cpu", "--output", str(tmp_path / name))
    assert done.exit_code == 2
    assert message in done.output


def test_settings_that_do_not_fit_together_are_refused_first(tmp_path):
    with pytest.raises(InputError, match="max_seq_len"):
        calibrate(RunConfig(device="cpu", max_seq_len=1_000_000), tmp_path / "here.toml")
    assert not list(tmp_path.iterdir())
