"""An OpenAI-compatible reverse proxy that records the calls that pass: ``manage.py record``. ``wire`` reads and amends
bodies, ``proxy`` passes them on, ``writer`` stores them in a separate thread. ``sessions`` finds the trajectory that a
call belongs to."""
