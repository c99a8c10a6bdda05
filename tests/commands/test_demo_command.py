"""`minipaged demo`: what stops it stops it before any work."""

import pytest

from coursekit.commands import demo
from minipaged import cli


def test_a_folder_that_cannot_be_written_is_noticed_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo, "demonstrate", lambda args: pytest.fail("it worked first"))
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "out")]) == 1
    error = capsys.readouterr().err
    assert "cannot write in" in error
    assert "Not a directory. --out names another folder" in error
