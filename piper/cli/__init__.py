"""The command line: ``piper train``, ``check``, ``show``, ``simulate``, ``profile``, ``compare``,
``demo``.

Commands only combine functions of the other packages. Exit codes:

    0   done
    1   refused: the model, the strategy, a file or a memory limit
    2   the command itself is wrong
    3   a run failed
    130 interrupted
"""
