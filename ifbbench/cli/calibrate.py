"""`ifbbench calibrate`: measure this machine, and write a hardware profile to simulate it with."""

from pathlib import Path
from typing import Any

import click

from ifbbench.cli.options import Command, SettingOption
from ifbbench.config import from_mapping, setting

SETTINGS = ("device", "model", "dtype", "kv_cache_dtype", "max_batch_size", "max_num_tokens", "max_seq_len",
            "tokens_per_block", "max_tokens_in_paged_kvcache", "seed", "quiet")  # fmt: skip
HELP = {
    "dtype": "Data type of the weights. [float32, bf16, fp16; default: float32]",
    "device": "What to measure. [auto, cpu, cuda; default: auto]",
    "max_batch_size": "Measure batches up to this size. Default: 16 on CPU, else 2048.",
    "seed": "Seed of the measured requests and of their order, of weights and prompts. [at least 0; default: 0]",
    "quiet": "No progress line and no tables. [default: off]",
}


class CalibrateCommand(Command):
    """Takes the settings that say what is measured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [SettingOption(setting(name), HELP.get(name)) for name in SETTINGS]


@click.command(cls=CalibrateCommand)
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE",
              help="The profile (.toml); its chart goes beside it (.png). Default: DEVICE-MODEL.toml.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace an existing profile and chart.")
@click.option("--quick", is_flag=True, help="Measure a few batches once: seconds instead of minutes, and less exact.")
def calibrate(output: Path | None, overwrite: bool, quick: bool, **options: Any) -> None:
    """Measure the executor on this machine, and write a hardware profile for simulated runs.

    Iterations of all kinds and sizes run as in `ifbbench run`, and the constants of the cost model are fitted to the
    times they take. The profile is then a device:

        ifbbench calibrate --device cpu --output here.toml

        ifbbench run trace.jsonl --device sim:here.toml
    """
    config = from_mapping({name: value for name, value in options.items() if value is not None})

    from ifbbench.cli.progress import progress_line
    from ifbbench.planning.calibrate import calibrate as run_calibration

    with progress_line("calibrate", config.quiet) as progress:
        found = run_calibration(config, output, overwrite=overwrite, quick=quick, progress=progress,
                                owns_process=True)  # fmt: skip
    if not config.quiet:
        from ifbbench.cli.console import report_console
        from ifbbench.planning.calibrate import print_calibration

        print_calibration(found, report_console())
    click.echo(f"The profile is {found.path}, its chart {found.path.with_suffix('.png')}; simulate it by "
               f"`--device sim:{found.path}`.")
