"""What is read out of one notebook. Real students' work never enters the tests: all of this is made up."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.submissions.archives import Unreadable
from grading.submissions.notebooks import html_to_text, read_notebook
from grading.submissions.reading import read_submissions

R_KERNEL = {"kernelspec": {"name": "ir", "language": "R"}, "authors": [{"name": "Jane Doe"}]}
PNG = "iVBORw0KGgo="


def code(source, outputs=(), count=1):
    return {"cell_type": "code", "source": source, "outputs": list(outputs), "execution_count": count, "metadata": {}}


def text(source, **more):
    return {"cell_type": "markdown", "source": source, "metadata": {"author": "Jane Doe"}, **more}


def result(**data):
    mime = {key.replace("__", "/"): value for key, value in data.items()}
    return {"output_type": "execute_result", "data": mime}


def read(*cells, metadata=R_KERNEL, **more):
    return read_notebook(json.dumps({"nbformat": 4, "metadata": metadata, "cells": list(cells), **more}))


def test_cells_become_parts_in_order_with_their_place():
    document = read(text(["# Sales\n", "by region"]), code("mean(x)", [result(text__plain="[1] 4.5")]))

    assert [(part.kind, part.text, part.location) for part in document.parts] == [
        ("text", "# Sales\nby region", "cell 1"),
        ("code", "mean(x)", "cell 2"),
        ("output", "[1] 4.5", "cell 2, output"),
    ]
    assert (document.language, document.notes, document.images_left_out) == ("R", (), 0)


@pytest.mark.public_report("jsboige/CoursIA 8325")
def test_cells_without_an_id_are_read():
    """nbformat 4.5 wants one; tools that run notebooks write null."""
    cells = [{**cell, "id": None} for cell in (text("Sales"), code("x"))]

    assert [part.text for part in read(*cells, nbformat_minor=5).parts] == ["Sales", "x"]


@pytest.mark.public_report("jupyter/nbgrader 1297", "ucbds-infra/otter-grader 443")
def test_letters_and_signs_come_through_as_they_are(tmp_path):
    """There subscripts, arrows and a Spanish translation were no text for the machine's own encoding."""
    signs = "x₀ ≤ 3 → señal, αβ ⇒ x¹"
    notebook = {"nbformat": 4, "metadata": R_KERNEL, "cells": [text(signs), code(f"# {signs}")]}
    for ascii_only in (True, False):
        (tmp_path / f"{ascii_only}.ipynb").write_text(json.dumps(notebook, ensure_ascii=ascii_only), "utf-8")

    for work in read_submissions(tmp_path):
        assert ([part.text for part in work.parts], work.notes) == ([signs, f"# {signs}"], ())


def test_blank_cells_are_left_out_and_the_others_keep_their_numbers():
    document = read(code("  \n"), text(""), code("x <- 1\n\n"))

    assert [(part.text, part.location) for part in document.parts] == [("x <- 1", "cell 3")]


@pytest.mark.parametrize(
    ("metadata", "language"),
    [
        ({"kernelspec": {"name": "python3"}}, "Python"),
        ({"language_info": {"name": "python", "version": "3.11"}}, "Python"),
        ({"language_info": {"name": "R"}}, "R"),
        ({"kernelspec": {"name": "ir432", "language": "R"}}, "R"),
    ],
)
def test_the_kernel_says_the_language(metadata, language):
    assert read(code("1"), metadata=metadata).language == language


def test_a_missing_and_an_unknown_kernel_are_noted_without_its_name():
    assert read(code("1"), metadata={}).notes == ("kernel missing",)
    assert read(code("1"), metadata={"kernelspec": {"name": "janes-kernel"}}).notes == ("kernel's language not known",)


def test_names_in_metadata_never_reach_a_part():
    document = read(code("x", [{**result(text__plain="1"), "metadata": {"by": "Jane Doe"}}]), text("prose"))

    assert "Jane" not in repr(document)


def test_a_quarto_header_in_the_first_cell_is_left_out():
    header = {"cell_type": "raw", "source": "---\ntitle: Sales\nauthor: Jane Doe\n---\n"}
    document = read(header, {"cell_type": "raw", "source": "kept"})

    assert [part.text for part in document.parts] == ["kept"]


def test_cells_that_were_never_run_are_noted():
    assert read(code("a", count=None), code("b", count=None), code("", count=None)).notes == (
        "2 code cells were never run",
    )
    assert read(code("a", count=None), code("b")).notes == ("1 code cell was never run",)
    assert read(code("a", [result(text__plain="1")], count=None)).notes == ()


def test_pieces_of_one_stream_are_joined_and_streams_kept_apart():
    def stream(name, words):
        return {"output_type": "stream", "name": name, "text": words}

    document = read(code("x", [stream("stdout", ["a\n", "b"]), stream("stdout", "c"), stream("stderr", "warning")]))

    assert [part.text for part in document.parts[1:]] == ["a\nbc", "warning"]
    assert [part.location for part in document.parts[1:]] == ["cell 1, output 1", "cell 1, output 2"]


def test_an_error_is_an_output_without_ansi_codes_and_its_name_where_there_is_no_traceback():
    trace = ["\x1b[0;31mError\x1b[0m in x: \x1b]8;;http://h\x07object\x1b]8;;\x07 'y' not found", "Traceback:"]
    for lines, said in ((trace, "Error in x: object 'y' not found\nTraceback:"), ([], "NameError: no y")):
        error = {"output_type": "error", "ename": "NameError", "evalue": "no y"} | (
            {"traceback": lines} if lines else {}
        )
        document = read(code("x", [error]))

        assert document.parts[1].text == said
        assert document.notes == ("1 code cell ended in an error",)


def test_an_escape_that_never_ends_takes_nothing_with_it():
    document = read(code("x", [result(text__plain="\x1b]8 and then the answer is 42")]))

    assert "the answer is 42" in document.parts[1].text


def test_of_a_progress_bar_the_last_state_stays():
    bar = {"output_type": "stream", "name": "stderr", "text": "10%\r50%\r100%\ndone\r\n"}

    assert read(code("x", [bar])).parts[1].text == "100%\ndone"


@pytest.mark.parametrize("mime", ["image/png", "image/svg+xml", "application/pdf", "application/vnd.plotly.v1+json"])
def test_pictures_are_counted_and_left_out(mime):
    document = read(code("plot(x)", [{"output_type": "display_data", "data": {mime: PNG}}]))

    assert [part.kind for part in document.parts] == ["code"]
    assert document.images_left_out == 1


def test_a_plot_in_three_formats_is_one_picture_and_its_text_stays():
    data = {"image/png": PNG, "image/svg+xml": "<svg/>", "text/plain": "plot without title"}
    document = read(code("plot(x)", [{"output_type": "display_data", "data": data}]))

    assert document.images_left_out == 1
    assert document.parts[1].text == "plot without title"


def test_attachments_and_inline_base64_pictures_are_counted_and_left_out():
    cell = text(f"see ![a](attachment:a.png) ![b](data:image/png;base64,{PNG}) end", attachments={"a.png": {}})
    document = read(cell)

    assert document.parts[0].text == "see ![a](attachment:a.png) ![b]([image left out]) end"
    assert document.images_left_out == 2


def test_widgets_are_ignored():
    data = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "IntSlider(value=3)"}

    assert [part.kind for part in read(code("w", [{"output_type": "display_data", "data": data}])).parts] == ["code"]


def test_html_alone_is_reduced_and_plain_text_preferred():
    table = "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2 &lt; 3</td></tr></table>"

    assert read(code("x", [result(text__html=table)])).parts[1].text == "a | b\n1 | 2 < 3"
    assert read(code("x", [result(text__html=table, text__plain="A tibble")])).parts[1].text == "A tibble"
    placeholder = result(text__html=table, text__plain="<IPython.core.display.HTML object>")
    assert read(code("x", [placeholder])).parts[1].text == "a | b\n1 | 2 < 3"


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("<p>a</p><p>b</p>", "a\nb"),
        ("<style>x{}</style>a<script>if (1 < 2) {}</SCRIPT>b<!-- c -->d", "abd"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
        ("a<br/>b<", "a\nb<"),
        ("a<script>never closed", "a"),
        ("a &#" + "9" * 5000 + "; b", "a \ufffd b"),
    ],
)
def test_html_is_reduced_to_text(markup, expected):
    assert html_to_text(markup)[0] == expected


def test_pictures_in_html_are_counted():
    assert html_to_text("<img src='x'><div><svg><text>axis</text></svg></div>done") == ("done", 2)
    assert html_to_text("<img src='x.png' alt='a > b, as a plot'>done") == ("done", 1)
    assert html_to_text("<!-- <img src='x.png'> -->done") == ("done", 0)


@pytest.mark.parametrize("piece", ["<!--", "<", "<a", "<script", "<script>", "</td", "&#", "<svg><"])
def test_broken_html_of_a_million_characters_is_read_in_one_pass(piece):
    assert isinstance(html_to_text(piece * (1_000_000 // len(piece)))[0], str)


def test_nbformat_3_is_read():
    outputs = [
        {"output_type": "pyout", "text": ["[1] 2"], "png": PNG},
        {"output_type": "stream", "stream": "stdout", "text": "hello"},
        {"output_type": "pyerr", "ename": "E", "evalue": "v", "traceback": ["E: v"]},
    ]
    cells = [
        {"cell_type": "heading", "level": 1, "source": "Sales"},
        {"cell_type": "code", "language": "python", "input": ["1+1"], "prompt_number": 1, "outputs": outputs},
        {"cell_type": "code", "language": "python", "input": "never", "outputs": []},
    ]
    document = read_notebook(json.dumps({"nbformat": 3, "metadata": {"name": ""}, "worksheets": [{"cells": cells}]}))

    assert [part.text for part in document.parts] == ["Sales", "1+1", "[1] 2", "hello", "E: v", "never"]
    assert (document.language, document.images_left_out) == ("Python", 1)
    assert document.notes == ("1 code cell was never run", "1 code cell ended in an error")


def test_cells_of_no_known_kind_are_noted():
    assert read({"cell_type": "chart"}, 7, {"cell_type": ["code"]}).notes == ("3 cells of no known kind left out",)


def test_half_characters_and_controls_are_replaced():
    document = read_notebook('{"metadata": {}, "cells": [{"cell_type": "raw", "source": "a\\ud83d b\\u0000c\\td"}]}')

    assert document.parts[0].text == "a\ufffd b\ufffdc\td"
    document.parts[0].text.encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not valid JSON: "),
        ("<html>Please log in</html>", "not valid JSON: "),
        ("[]", "not an object"),
        ('{"cells": {}}', "no list of cells"),
        ("[" * 200_000, "nested too deeply"),
        ('{"cells": [' + "9" * 5000 + "]}", "thousands of digits"),
    ],
)
def test_what_is_no_notebook_says_why(content, why):
    with pytest.raises(Unreadable, match=why):
        read_notebook(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CELL_KEYS = ["cell_type", "source", "input", "outputs", "attachments", "execution_count", "language"]
OUTPUTS = st.fixed_dictionaries(
    {"output_type": st.sampled_from(["stream", "error", "display_data", "pyout", "pyerr"]) | JSON},
    optional={"data": JSON | st.fixed_dictionaries({"text/html": JSON, "image/png": JSON}), "text": JSON, "ename": JSON}
    | {"traceback": JSON, "html": JSON, "name": JSON},
)
CELLS = st.fixed_dictionaries(
    {"cell_type": st.sampled_from(["code", "markdown", "raw", "heading"]) | JSON},
    optional=dict.fromkeys(CELL_KEYS[1:], JSON) | {"outputs": st.lists(OUTPUTS, max_size=3)},
)


@given(cells=st.lists(CELLS | JSON, max_size=4), metadata=JSON, v3=st.booleans())
def test_a_notebook_with_anything_in_its_places_is_read(cells, metadata, v3):
    body = {"worksheets": [{"cells": cells}]} if v3 else {"cells": cells}

    document = read_notebook(json.dumps({**body, "metadata": metadata}))

    for part in document.parts:
        assert part.text.encode()


@given(content=st.binary(max_size=200) | st.binary(max_size=60).map(lambda noise: b'{"cells": [' + noise + b"]}"))
def test_arbitrary_bytes_as_a_notebook_are_a_problem_and_no_exception(tmp_path_factory, content):
    path: Path = tmp_path_factory.getbasetemp() / "any.ipynb"
    path.write_bytes(content)

    [submission] = read_submissions(path)

    assert submission.parts == () or not submission.problem
    assert "bug" not in submission.problem
