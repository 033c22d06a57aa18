"""Word documents and PDFs: what is read of them, and what one that means harm may cost."""

import io
import json
import sys
import time
import zipfile
from pathlib import Path

import pytest

from grading.submissions import documents
from grading.submissions.archives import Unreadable
from grading.submissions.documents import read_docx, read_pdf, without_exports
from grading.submissions.reading import Submission, SubmissionPart, read_submissions

pytest.importorskip("mammoth", reason="mammoth is not installed: pip install 'kvasir-inference[documents]'")
pytest.importorskip("pypdf", reason="pypdf is not installed: pip install 'kvasir-inference[documents]'")

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="xml" ContentType="application/xml"/></Types>'
)
RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    f'<Relationship Id="r1" Type="{RELATION}" Target="word/document.xml"/></Relationships>'
)


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def docx(body: str, start: str = "", **more: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", TYPES)
        archive.writestr("_rels/.rels", RELATIONS)
        archive.writestr("word/document.xml", f'{start}<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>')
        for name, data in more.items():
            archive.writestr(f"word/{name}.xml", data)
    return buffer.getvalue()


def pdf(*contents: str, kids: str = "", count: int | None = None, forms: dict[str, str] | None = None) -> bytes:
    """A PDF of these pages' content streams; `forms`: drawings that they may draw, by name."""
    number_of_forms = len(forms or {})
    first_page = 4 + number_of_forms
    names = list(forms or {})
    drawings = " ".join(f"/{name} {4 + place} 0 R" for place, name in enumerate(names))
    resources = f"/Resources << /Font << /F 3 0 R >> /XObject << {drawings} >> >>"
    pages = [first_page + 2 * place for place in range(len(contents))]
    page_kids = kids or " ".join(f"{page} 0 R" for page in pages)
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{page_kids}] /Count {count or len(contents)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for text in (forms or {}).values():
        head = f"<< /Type /XObject /Subtype /Form /BBox [0 0 1 1] {resources} /Length {len(text)} >>"
        objects.append(f"{head}\nstream\n{text}\nendstream")
    for page, text in zip(pages, contents, strict=True):
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] {resources} /Contents {page + 1} 0 R >>")
        objects.append(f"<< /Length {len(text)} >>\nstream\n{text}\nendstream")
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    start = len(out)
    size = len(objects) + 1
    end = f"trailer\n<< /Root 1 0 R /Size {size} >>\nstartxref\n{start}\n%%EOF"
    return out + f"xref\n0 {size}\n0000000000 65535 f \n{table}{end}".encode()


def line(text: str) -> str:
    return f"BT /F 12 Tf 50 700 Td ({text}) Tj ET"


def reason(data: bytes, read: object = read_docx) -> str:
    started = time.monotonic()
    with pytest.raises(Unreadable) as refusal:
        read(data)  # type: ignore[operator]
    assert time.monotonic() - started < 20
    return str(refusal.value)


def test_a_word_document_is_text_with_its_tables() -> None:
    cell = "<w:tc>{}</w:tc>".format
    table = f"<w:tbl><w:tr>{cell(paragraph('North'))}{cell(paragraph('12'))}</w:tr></w:tbl>"
    work = read_docx(docx(paragraph("Sales &amp; more") + table + "<w:ins>" + paragraph("Added") + "</w:ins>"))
    text = work.parts[0].text
    assert text.split("\n")[0] == "Sales & more"
    assert {"North", "12", "Added"} <= set(text.replace("|", "\n").replace(" ", "").split("\n"))
    assert (work.parts[0].kind, work.doubtful_notes) == ("text", ())


def test_an_equation_that_is_not_read_is_asked_about() -> None:
    math = '<m:oMath xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"><m:r><m:t>x</m:t></m:r></m:oMath>'
    assert read_docx(docx(f"<w:p>{math}</w:p>")).doubtful_notes == ("1 equation in it can't be read",)


@pytest.mark.parametrize("read", [read_docx, read_pdf])
@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 and then nothing", b"%PDF-1.7\n%%EOF", bytes(range(256)) * 40])
def test_damage_is_said_in_a_sentence(data: bytes, read: object) -> None:
    assert "damaged" in reason(data, read)


def test_a_zip_bomb_is_not_unpacked() -> None:
    assert "larger than a document needs" in reason(docx(paragraph("x"), media=bytes(65 << 20)))


def test_a_size_that_is_a_lie_is_no_way_in() -> None:
    data = bytearray(docx("<w:p/>" * 2_000_000))
    at = data.rfind(b"PK\x01\x02", 0, data.rfind(b"word/document.xml"))
    data[at + 24 : at + 28] = (1000).to_bytes(4, "little")
    assert "damaged" in reason(bytes(data))


def test_many_tags_in_few_bytes_are_not_parsed() -> None:
    assert "more than a document needs" in reason(docx("<w:p/>" * 500_000))


@pytest.mark.parametrize(
    "start",
    [
        '<!DOCTYPE d [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>',
        '<!DOCTYPE d [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
        '<?xml version="1.0" encoding="cp037"?>',
    ],
)
def test_entities_are_neither_expanded_nor_fetched(start: str) -> None:
    assert "entities" in reason(docx(paragraph("x"), start))


def test_tables_within_tables_without_end_are_refused() -> None:
    deep = "<w:tbl><w:tr><w:tc>" * 3_000 + "</w:tc></w:tr></w:tbl>" * 3_000
    assert "nested too deeply" in reason(docx(deep))


def test_a_pdf_is_text_page_by_page() -> None:
    pages = [
        line(f"Page {number}: the mean of the north is twelve, and that of the south is nine, so it sells more.")
        for number in (1, 2)
    ]
    work = read_pdf(pdf(*pages))
    assert [part.text.count("the mean of the north") for part in work.parts] == [2]
    assert work.doubtful_notes == ()


def test_a_scan_needs_review() -> None:
    assert read_pdf(pdf(line("hw 5"), "")).doubtful_notes == ("4 characters of text on 2 pages: it may be a scan",)


def test_a_page_tree_without_end_is_left() -> None:
    assert "damaged" in reason(pdf(line("x"), kids="2 0 R 4 0 R"), read_pdf)
    assert "larger than a document needs" in reason(pdf(line("x"), kids="4 0 R " * 50_000, count=50_000), read_pdf)


def test_of_many_pages_none_is_read() -> None:
    assert "301 pages" in reason(pdf(*[""] * 301), read_pdf)


def test_drawings_that_draw_each_other_are_bounded() -> None:
    """Ten drawings, each of which draws the next ten times."""
    names = [f"D{number}" for number in range(10)]
    forms = {name: f"/{following} Do\n" * 10 for name, following in zip(names, [*names[1:], names[-1]], strict=True)}
    assert "more than a document needs" in reason(pdf("/D0 Do", forms=forms), read_pdf)


def test_a_password_is_asked_for() -> None:
    import pypdf

    writer = pypdf.PdfWriter(io.BytesIO(pdf(line("x"))))
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(buffer := io.BytesIO())
    assert "encrypted" in reason(buffer.getvalue(), read_pdf)


@pytest.mark.parametrize(("name", "module"), [("essay.docx", "mammoth"), ("essay.pdf", "pypdf")])
def test_without_the_extra_the_command_is_named(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(docx(paragraph("x")) if name.endswith("x") else pdf(line("x")))
    monkeypatch.setitem(sys.modules, module, None)
    [work] = read_submissions(tmp_path)
    assert documents._COMMAND in work.problem


def notebook(*sources: str) -> str:
    cells = [{"cell_type": "markdown", "metadata": {}, "source": source} for source in sources]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def test_a_pdf_of_the_notebook_beside_it_counts_once_and_loses_nothing(tmp_path: Path) -> None:
    work = tmp_path / "ada"
    work.mkdir()
    (work / "hw5.ipynb").write_text(notebook("The mean of all orders is 84.", "It rose in May, and fell in June."))
    lines = ["[1]: The mean of all", "orders is 84.", "It rose in May, and", "fell in June.", "But the median fell."]
    (work / "hw5.pdf").write_bytes(pdf(*map(line, lines)))

    [read] = read_submissions(tmp_path)

    assert [part.text for part in read.parts if "(.pdf)" in part.location] == ["But the median fell."]
    assert any("all but 1 of 5 lines stand in another file" in note for note in read.notes)


@pytest.mark.parametrize(
    ("source", "printed", "is_new"),
    [
        ("x = 5", "x = -5", True),
        ("x = -5", "x = 5", True),
        ("-5", "5", True),
        ("y <= 0.5", "y >= 0.5", True),
        ("a + b", "a − b", True),
        ("x = -5", "[3]: x = −5", False),
        ('print("a", x)', "print(“a”, x)", False),
    ],
)
def test_a_line_of_an_export_with_another_sign_is_work(source: str, printed: str, is_new: bool) -> None:
    def work(*lines: str) -> Submission:
        return Submission("", "", (SubmissionPart("code", "\n".join(lines), ""),))

    same = ["mean(x)", "sum(x)", "length(x)"]
    _, (_, export) = without_exports([("a (.ipynb)", work(source, *same)), ("b (.pdf)", work(printed, *same))])

    assert [part.text for part in export.parts] == [printed] * is_new


def test_markup_that_a_page_does_not_show_makes_no_line_new() -> None:
    source = Submission("", "", (SubmissionPart("text", "# A *fair* test\n- It `rose`: **see** $x$.", ""),))
    page = Submission("", "", (SubmissionPart("text", "A fair test\n• It rose: see x.", ""),))

    assert without_exports([("a (.md)", source), ("b (.pdf)", page)])[1][1].parts == ()


def test_another_text_beside_a_notebook_is_read_whole(tmp_path: Path) -> None:
    work = tmp_path / "ada"
    work.mkdir()
    (work / "hw5.ipynb").write_text(notebook("The mean of all orders is 84."))
    (work / "essay.docx").write_bytes(docx(paragraph("The mean of all orders is 84.") + paragraph("I doubt it.")))

    [read] = read_submissions(tmp_path)

    assert "The mean" in "".join(part.text for part in read.parts if "(.docx)" in part.location)
    assert not any("export" in note for note in read.notes)


def test_a_document_may_call_its_text_otherwise(tmp_path: Path) -> None:
    """Word on the web calls it `document2.xml`; `_rels/.rels` says where it is (ECMA-376, part 2, 9.3)."""
    hidden = "<w:p><w:r><w:rPr><w:vanish/></w:rPr><w:t>nobody sees it</w:t></w:r></w:p>"
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(docx(paragraph("Sales rose.") + hidden))) as source,
        zipfile.ZipFile(buffer, "w") as target,
    ):
        for name in source.namelist():
            renamed = name.replace("document.xml", "document2.xml")
            target.writestr(renamed, source.read(name).replace(b"document.xml", b"document2.xml"))

    work = read_docx(buffer.getvalue())

    assert work.parts[0].text.startswith("Sales rose.")
    assert work.doubtful_notes == ("hidden text: “nobody sees it”",)


def test_runs_that_never_end_are_looked_at_once() -> None:
    body = paragraph("Sales rose.") + "<!--" + "<w:r>" * 100_000 + "-->"

    assert read_docx(docx(body)).parts[0].text == "Sales rose."


def test_an_address_alone_in_a_document_is_a_link(tmp_path: Path) -> None:
    for name, text in (("ada.docx", "https://example.org/hw5"), ("bo.docx", "Done: https://example.org/hw5")):
        (tmp_path / name).write_bytes(docx(paragraph(text)))

    ada, bo = read_submissions(tmp_path)

    assert (ada.link, bo.link) == ("https://example.org/hw5", "")
    assert len(ada.file_digests) == 1, "equal documents are found as other equal files are"
