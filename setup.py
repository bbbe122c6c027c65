"""The part of the build that pyproject.toml cannot say: cffi's module and the abi3 tag."""

from setuptools import setup

setup(
    cffi_modules=["native/build_ffi.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
