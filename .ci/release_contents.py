"""Look into what was built: ``python release_contents.py dist``. Needs rattler-build's package."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import rattler_build


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = message_from_bytes(archive.read(metadata))
    strange = [n for n in names if not re.match(r"distsession/|distsession-[^/]+\.dist-info/", n)]
    assert not strange, f"not of the package: {strange}"
    tests = [name for name in names if re.search(r"(^|/)(tests?|conftest)[/_.]", name)]
    assert not tests, f"tests in the wheel: {tests}"
    assert "distsession/py.typed" in names
    page = told.get_payload(decode=True)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", str(page, "utf-8"))
    relative = [link for pair in links for link in pair if link and not link.startswith("https:")]
    assert not relative, f"lead nowhere outside the repository: {relative}"
    with tarfile.open(sdist) as source:
        there = {name.partition("/")[2] for name in source.getnames()}
    for name in ("LICENSE", "CHANGELOG.md", "pyproject.toml", "tests/conftest.py"):
        assert name in there, f"the sdist lacks {name}"
    (rendered,) = rattler_build.Stage0Recipe.from_file("recipe/recipe.yaml").render(
        render_config=rattler_build.RenderConfig(
            platform=rattler_build.PlatformConfig(target_platform="linux-64")
        )
    )
    recipe = rendered.recipe.to_dict()["package"]
    assert recipe["version"] == told["Version"], (recipe, told["Version"])
    print(f"{told['Name']} {told['Version']}: {len(names)} files, {len(links)} links, a recipe")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
