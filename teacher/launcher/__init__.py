"""Commands `serve`, `join` and `stop`, which start and stop the processes of a service on this machine.

They import the standard library only, so that they start at once and stop a service whose installation is damaged.

A run folder contains for each process: ``NAME.pid`` (see ``pid_files``), ``NAME.log``, and ``NAME.ready`` once it
serves. ``.start.lock`` is locked while a start uses the folder.
"""
