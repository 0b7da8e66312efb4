"""Build hook of hatchling: compiles the modules of the simulation loop with mypyc, if it can.

Without a C compiler the package is built as pure Python. `ifbbench --version` reports which of the two runs.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Types of other packages are not needed, and reading them takes a minute.
MYPY_OPTIONS = (
    "--config-file=",
    "--no-site-packages",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--explicit-package-bases",
)


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the `modules` of the hook's configuration into the wheel, or for an editable install beside them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the files to the wheel, which is then one for this version of Python and this platform.

        A build of the same sources, by this hook and this version of mypyc, is kept: an editable install leaves one
        beside the sources."""
        compiled = _load(Path(self.root) / "ifbbench" / "compiled.py")
        if os.environ.get(compiled.ENVIRONMENT):
            shutil.rmtree(compiled.DIRECTORY, ignore_errors=True)
            return
        try:
            build = _description(compiled, self.config["modules"])
            path = compiled.DIRECTORY / compiled.BUILD
            if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != build:
                shutil.rmtree(compiled.DIRECTORY, ignore_errors=True)
                compile_modules(Path(self.root), compiled, self.config["modules"])
                path.write_text(json.dumps(build, indent=1) + "\n", encoding="utf-8")
        except (Exception, SystemExit) as error:  # mypyc ends the process with its errors
            shutil.rmtree(compiled.DIRECTORY, ignore_errors=True)
            self.app.display_warning(f"ifbbench is built as pure Python; its loop was not compiled: {error}")
            return
        build_data["artifacts"].append(f"ifbbench/{compiled.DIRECTORY.name}/*")
        build_data["pure_python"], build_data["infer_tag"] = False, True


def compile_modules(root: Path, compiled: Any, modules: Sequence[str]) -> None:
    """Compile `modules` of the package in `root` to the directory of builds. compiled: the module `ifbbench.compiled`.

    SystemExit if mypyc finds errors; errors of setuptools if the C compiler does or there is none."""
    # Imported here because pure Python needs neither.
    from mypyc.build import mypycify
    from setuptools import Distribution

    sources = {module: compiled.source_of(module) for module in modules}
    with TemporaryDirectory() as directory, chdir(root):
        paths = [str(source.relative_to(root)) for source in sources.values()]
        extensions = mypycify(
            [*MYPY_OPTIONS, f"--cache-dir={directory}", *paths],
            opt_level="1",
            debug_level="0",
            multi_file=True,
            target_dir=directory,
            group_name=compiled.LIBRARY.removesuffix("__mypyc"),
        )
        for extension in extensions:
            extension.extra_compile_args = [flag for flag in extension.extra_compile_args if flag != "-Werror"]
        command = _parallel_build(Distribution({"ext_modules": extensions}))
        command.build_lib, command.build_temp = f"{directory}/lib", f"{directory}/objects"
        command.ensure_finalized()
        command.run()
        compiled.DIRECTORY.mkdir()
        for extension in extensions:
            built = Path(command.get_ext_fullpath(extension.name))
            shutil.copy(built, compiled.DIRECTORY / (extension.name + EXTENSION_SUFFIXES[0]))


def _parallel_build(distribution: Any) -> Any:
    """The command of setuptools that builds extensions, with a C compiler for each core: it compiles one file after
    the other, and there is one for each module."""
    from setuptools.command.build_ext import build_ext

    class ParallelBuild(build_ext):  # type: ignore[misc]
        def build_extensions(self) -> None:
            compiler: Any = self.compiler
            compile_files = compiler.compile

            def compile_apart(sources: list[str], *args: Any, **kwargs: Any) -> list[str]:
                with ThreadPoolExecutor(os.cpu_count()) as threads:
                    objects = threads.map(lambda source: compile_files([source], *args, **kwargs), sources)
                    return [path for paths in objects for path in paths]

            compiler.compile = compile_apart
            super().build_extensions()

    return ParallelBuild(distribution)


def _description(compiled: Any, modules: Sequence[str]) -> dict[str, Any]:
    """What a build of `modules` is made from. PackageNotFoundError without mypy."""
    # The types in all other modules of the package decide what mypyc makes of these.
    read = hashlib.sha256(metadata.version("mypy").encode())
    for path in (Path(__file__), *sorted(compiled.PACKAGE.rglob("*.py"))):
        read.update(str(path).encode() + path.read_bytes())
    return {
        "suffix": EXTENSION_SUFFIXES[0],
        "read": read.hexdigest(),
        "sources": {module: compiled.digest(compiled.source_of(module)) for module in modules},
    }


def _load(path: Path) -> Any:
    """A module of the package that is built, which cannot be imported by name."""
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module
