"""examples/streamlit_chat.py, as it stands but for address and model: two turns of a conversation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL, Pipeline
from tests.support.processes import ROOT, environment

pytestmark = pytest.mark.system

# In a process of its own: Streamlit's import and its threads are not the tests'.
DRIVE = """
import json, sys
from streamlit.testing.v1 import AppTest

app = AppTest.from_file(sys.argv[1], default_timeout=60).run()
for question in ("What is a queue?", "And a stack?"):
    app.chat_input[0].set_value(question).run()
    assert not app.exception, app.exception
print(json.dumps([(message.name, message.markdown[0].value) for message in app.chat_message]))
"""


def test_a_chat_in_streamlit_goes_on_turn_by_turn(tmp_path: Path) -> None:
    chat = (ROOT / "examples/streamlit_chat.py").read_text("utf-8")
    with Pipeline() as pipeline, ServedGateway(pipeline.client, tmp_path) as served:
        pipeline.start()
        script = tmp_path / "chat.py"
        script.write_text(chat.replace("http://127.0.0.1:8000", served.url).replace("kvasir-demo", MODEL), "utf-8")
        command = [sys.executable, "-c", DRIVE, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, _ in said] == ["user", "assistant", "user", "assistant"]
    assert [said[0][1], said[2][1]] == ["What is a queue?", "And a stack?"]
    assert said[1][1]
    assert said[3][1]
