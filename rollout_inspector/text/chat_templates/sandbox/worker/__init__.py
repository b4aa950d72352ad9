"""The program of the sandbox. It knows the standard library and Jinja alone, trusts no template and holds no secret.
``__main__`` loads this folder as a package of its own, so its modules import one another and nothing else of ours."""
