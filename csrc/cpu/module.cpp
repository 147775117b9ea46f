// The Python module octavo._cpu: instruction sets, threads, tapes; each kernel family binds its own operations.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "denormals.hpp"
#include "isa.hpp"
#include "ops.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace octavo;

namespace {

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "CPU kernels: operations on buffers given by address.";
  nb::enum_<Dtype>(m, "Dtype").value("f32", Dtype::f32).value("bf16", Dtype::bf16).value("i8", Dtype::i8);
  nb::enum_<Activation>(m, "Activation")
      .value("none", Activation::none)
      .value("silu", Activation::silu)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("relu", Activation::relu)
      .value("quick_gelu", Activation::quick_gelu)
      .value("swiglu_oai", Activation::swiglu_oai)
      .value("relu2", Activation::relu2);

  nb::class_<IsaNames>(m, "IsaNames").def_ro("floats", &IsaNames::floats).def_ro("integers", &IsaNames::integers);
  m.def("available_isas", &available_isas);
  m.def("built_isas", &built_isas);
  m.def("processor_isas", &processor_isas);
  m.def("amx", [] { return amx::describe(amx::state()); }, "Whether the tiles of AMX are used, or why not.");
  m.def("isa", &chosen_isas);
  m.def("float_isa", [] { return isa().name; });
  m.def("integer_isa", [] { return integer_isa().name; });
  m.def("choose_isa", &choose_isa, nb::arg("names"));
  m.def("set_threads", [](int size, bool pin) { ThreadPool::instance().resize(size, pin); }, nb::arg("size"),
        nb::arg("pin") = false);
  m.def("num_threads", [] { return ThreadPool::instance().size(); });
  m.def("threads_pinned", [] { return ThreadPool::instance().pinned(); });

  nb::class_<Step>(m, "Step")
      .def("__init__",
           [](Step* s, int64_t tokens, int64_t sequences, int64_t decodes, uintptr_t token_ids, uintptr_t positions,
              uintptr_t slots, uintptr_t query_start, uintptr_t seq_lens, uintptr_t block_tables, int64_t stride,
              int64_t table_group_stride, int64_t slot_group_stride, int64_t sampled, uintptr_t sampled_rows, int64_t encoder,
              uintptr_t adapters, uintptr_t token_types, uintptr_t cross_lens, uintptr_t cross_tables,
              int64_t cross_table_stride, uintptr_t sees_until, uintptr_t rotary_positions, int64_t rotary_stride,
              uintptr_t num_drafts) {
             new (s) Step{tokens,
                          sampled,
                          encoder,
                          sequences,
                          decodes,
                          pointer<int64_t>(token_ids),
                          pointer<int64_t>(positions),
                          pointer<int64_t>(slots),
                          pointer<int32_t>(query_start),
                          pointer<int32_t>(seq_lens),
                          pointer<int32_t>(block_tables),
                          stride,
                          table_group_stride,
                          slot_group_stride,
                          pointer<int64_t>(sampled_rows),
                          pointer<int32_t>(adapters),
                          nullptr,
                          pointer<int64_t>(token_types),
                          pointer<int32_t>(cross_lens),
                          pointer<int32_t>(cross_tables),
                          cross_table_stride,
                          pointer<int32_t>(sees_until),
                          pointer<int64_t>(rotary_positions),
                          rotary_stride,
                          pointer<int32_t>(num_drafts)};
           },
           nb::arg("tokens"), nb::arg("sequences") = 0, nb::arg("decodes") = 0, nb::arg("token_ids") = 0,
           nb::arg("positions") = 0, nb::arg("slots") = 0, nb::arg("query_start") = 0, nb::arg("seq_lens") = 0,
           nb::arg("block_tables") = 0, nb::arg("block_table_stride") = 0,
           nb::arg("block_table_group_stride") = 0, nb::arg("slot_group_stride") = 0, nb::arg("sampled") = 0,
           nb::arg("sampled_rows") = 0, nb::arg("encoder") = 0, nb::arg("adapters") = 0,
           nb::arg("token_types") = 0, nb::arg("cross_lens") = 0, nb::arg("cross_tables") = 0,
           nb::arg("cross_table_stride") = 0, nb::arg("sees_until") = 0, nb::arg("rotary_positions") = 0,
           nb::arg("rotary_stride") = 0, nb::arg("num_drafts") = 0);
  nb::class_<Op>(m, "Op").def("run", [](Op& op, const Step& step) {
    nb::gil_scoped_release release;
    const auto mode = DenormalMode::flushed();
    op.run(step);
  });
  bind_tape(m);
  bind_gemm(m);
  bind_pointwise(m);
  bind_gated_delta(m);
  bind_attention(m);
  bind_quant(m);
  bind_lookup(m);  // after the classes of packed matrices
  bind_sampling(m);
  bind_moe(m);
  bind_lora(m);
  bind_selective_scan(m);
  bind_states(m);
}
