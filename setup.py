"""Builds the CPU kernels if there is a C++ compiler, which pyproject.toml cannot express."""

from glob import glob

from setuptools import Extension, setup

# Not a module: worker/kernels/native.py loads it with ctypes. It is compiled for OpenMP, but not
# linked to an OpenMP runtime, so that it uses the one that torch has loaded.
KERNELS = Extension(
    "longshore.worker.kernels._native",
    sources=["worker/kernels/native/library.cpp"],
    depends=glob("worker/kernels/native/*.h"),
    language="c++",
    extra_compile_args=[
        "-std=gnu++17",
        "-O3",
        "-g0",
        "-fopenmp",
        "-fno-exceptions",
        "-Wno-psabi",
        "-flto=auto",  # all processors take part
    ],
    extra_link_args=["-Wl,--as-needed", "-O3", "-g0", "-flto=auto"],
    optional=True,  # without a compiler, plain torch is used
)

setup(ext_modules=[KERNELS])
