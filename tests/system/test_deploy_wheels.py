"""A wheel on a machine is the one that is here: by its content, not by its name and size."""

from pathlib import Path

import pytest

from infra.config.settings import load_settings
from infra.deploy.remote import Remote
from tests.support.sshd import Sshd

pytestmark = pytest.mark.system


@pytest.mark.gate
def test_a_wheel_of_the_same_name_and_size_but_other_content_is_replaced(tmp_path: Path) -> None:
    config = tmp_path / "kvasir.toml"
    config.write_text('[machines.one]\nhost = "one"\nroles = []\n')
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("a-1-py3-none-any.whl", "b-1-py3-none-any.whl"):
        (wheels / name).write_bytes(name.encode() * 100)
    with Sshd("one", tmp_path / "one", tmp_path / "ssh_config") as machine:
        remote = Remote(load_settings(config=config, environ={}).machines["one"], tmp_path / "ssh_config")
        there = machine.home / "wheelhouse"
        assert remote.put_folder(wheels, str(there)) == ["a-1-py3-none-any.whl", "b-1-py3-none-any.whl"]
        assert remote.put_folder(wheels, str(there)) == []

        planted = there / "b-1-py3-none-any.whl"
        planted.write_bytes(planted.read_bytes()[::-1])

        assert remote.put_folder(wheels, str(there)) == ["b-1-py3-none-any.whl"]
        assert planted.read_bytes() == (wheels / planted.name).read_bytes()
