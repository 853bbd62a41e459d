"""The notebook's own process imports torch when the first tensor arrives, and says so."""

from __future__ import annotations

from .kernel import Notebook


def test_the_first_tensor_that_arrives_says_what_takes_so_long() -> None:
    notebook = Notebook()
    try:
        notebook.run(
            "import distsession, sys\n"
            "import distsession.kernel.progress\n"
            "distsession.kernel.progress.SHOW_AFTER_S = 0.0\n"
            "session = distsession.Session(2, backend='gloo')\n"
            "session.execute('t = torch.ones(3)')"
        )
        assert notebook.run("session.run(lambda: 3); 'torch' in sys.modules").result == "False"
        texts = notebook.updates(notebook.client.execute("x = session.pull('t')"))
        assert texts[0].startswith("importing torch in this process, for what the ranks have sent")
        assert notebook.run("float(x[1].sum())").result == "3.0"
        assert notebook.updates(notebook.client.execute("x = session.pull('t')")) == []
        notebook.run("session.close()")
    finally:
        notebook.close()
