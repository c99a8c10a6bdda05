"""Whether a kernel compiles for a card that is not here. The interpreter accepts what the compiler rejects.

To be imported where TRITON_INTERPRET is not set, before Triton is. No program is started and no file written:
Triton's own stages run as far as PTX, which is text, and the assembler that follows is left out.
"""

from collections.abc import Mapping
from typing import Any

PTX_VERSION = 80  # left open, Triton would ask the assembler, which is a program


def assembly_of(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], arch: int) -> str:
    """PTX of `kernel` for sm_`arch`. `types`: its run-time arguments ("*fp32", "i32"); `constants`: the rest.

    Raises SyntaxError with the compiler's reason and the line it complains of when it does not compile.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, CompilationError, make_backend

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source, target = ASTSource(kernel, signature, dict(constants)), GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = backend.parse_options({"ptx_version": PTX_VERSION, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    try:
        code = source.make_ir(target, options, functions, modules, context)
    except CompilationError as error:
        raise SyntaxError(reason_of(error)) from None
    metadata = {"target": target, **vars(options)}
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        code = stages[stage](code, metadata)
    return str(code)


def reason_of(error: Any) -> str:
    """In one line, from the innermost error: what the compiler rejects, and where."""
    while isinstance(error.__cause__, type(error)):  # one for each call of a function
        error = error.__cause__
    reason = error.error_message if error.__cause__ is None else str(error.__cause__)
    line = error.src.splitlines()[error.node.lineno - 1].strip() if error.src and error.node else ""
    return " ".join(f"{reason or 'rejected'}, in: {line}".split())
