# Target `blockscale_torch_abi`: PyTorch's stable ABI, from the PyTorch of the Python in use. Only
# headers and two library names: no Python header, no C++ ABI of PyTorch, no path in the result.
find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND "${Python3_EXECUTABLE}" -c "import torch; print(torch.__path__[0])"
  OUTPUT_VARIABLE torch_root
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE torch_result)
if(NOT torch_result EQUAL 0)
  message(FATAL_ERROR "BLOCKSCALE_TORCH: ${Python3_EXECUTABLE} cannot import torch; need "
                      "torch >= 2.11; install it there or pass -DPython3_EXECUTABLE=...")
endif()

add_library(blockscale_torch_abi INTERFACE)
target_include_directories(
  blockscale_torch_abi SYSTEM INTERFACE "${torch_root}/include"
                                        "${torch_root}/include/torch/csrc/api/include")
# Nothing newer than PyTorch 2.11 is used, whichever PyTorch the headers come from.
target_compile_definitions(blockscale_torch_abi
                           INTERFACE TORCH_TARGET_VERSION=0x020b000000000000ULL)
# Needed by name alone, found already loaded by `import torch`. libtorch brings in libtorch_cuda
# where there is one, so that the CUDA symbols of the stable ABI can be found.
target_link_libraries(
  blockscale_torch_abi INTERFACE "-Wl,--push-state,--no-as-needed" "${torch_root}/lib/libtorch.so"
                                 "${torch_root}/lib/libtorch_cpu.so" "-Wl,--pop-state")
