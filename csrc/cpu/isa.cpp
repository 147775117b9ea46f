#include "isa.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace octavo {

#define OCTAVO_DECLARE_FLOATS(name)                 \
  namespace name {                                  \
  const GemmTable* gemm_table();                    \
  const PointwiseTable* pointwise_table();          \
  const AttentionTable* attention_table();          \
  const QuantResults* quant_results();              \
  const SamplingTable* sampling_table();            \
  const MoeTable* moe_table();                      \
  const LoraTable* lora_table();                    \
  const GatedDeltaTable* gated_delta_table();       \
  const SelectiveScanTable* selective_scan_table(); \
  const StatesTable* states_table();                \
  }
#define OCTAVO_DECLARE_INTEGERS(name) \
  namespace name {                    \
  const QuantTable* quant_table();    \
  }
// Tables are asked for only where the processor runs the set: the functions that give them may use its instructions too.
#define OCTAVO_FLOATS(name)                                                                                           \
  Built<FloatIsa> {                                                                                                   \
    #name, [] {                                                                                                       \
      return FloatIsa{#name,                 name::gemm_table(),     name::pointwise_table(), name::attention_table(), \
                      name::quant_results(), name::sampling_table(), name::moe_table(),       name::lora_table(),      \
                      name::states_table(),  name::gated_delta_table(), name::selective_scan_table()};                 \
    }                                                                                                                 \
  }
#define OCTAVO_INTEGERS(name) \
  Built<IntegerIsa> { #name, [] { return IntegerIsa{#name, name::quant_table()}; } }

OCTAVO_DECLARE_FLOATS(generic)
OCTAVO_DECLARE_INTEGERS(generic)
#ifdef OCTAVO_HAS_FLOAT_avx2
OCTAVO_DECLARE_FLOATS(avx2)
#endif
#ifdef OCTAVO_HAS_FLOAT_avx512
OCTAVO_DECLARE_FLOATS(avx512)
#endif
#ifdef OCTAVO_HAS_FLOAT_amx_bf16
OCTAVO_DECLARE_FLOATS(amx_bf16)
#endif
#ifdef OCTAVO_HAS_FLOAT_avx512_bf16
OCTAVO_DECLARE_FLOATS(avx512_bf16)
#endif
#ifdef OCTAVO_HAS_INTEGER_avx2
OCTAVO_DECLARE_INTEGERS(avx2)
#endif
#ifdef OCTAVO_HAS_INTEGER_avx512
OCTAVO_DECLARE_INTEGERS(avx512)
#endif
#ifdef OCTAVO_HAS_INTEGER_avx_vnni
OCTAVO_DECLARE_INTEGERS(avx_vnni)
#endif
#ifdef OCTAVO_HAS_INTEGER_avx512_vnni
OCTAVO_DECLARE_INTEGERS(avx512_vnni)
#endif
#ifdef OCTAVO_HAS_INTEGER_amx_int8
OCTAVO_DECLARE_INTEGERS(amx_int8)
#endif

namespace {

using Names = std::vector<std::string>;

const IsaNames kKnown{{"amx_bf16", "avx512_bf16", "avx512", "avx2", "generic"}, {"amx_int8", "avx512_vnni", "avx_vnni", "avx512", "avx2", "generic"}};

template <class Isa>
struct Built {
  const char* name;
  Isa (*tables)();
};

const std::vector<Built<FloatIsa>>& built_floats() {
  static const std::vector<Built<FloatIsa>> built{
#ifdef OCTAVO_HAS_FLOAT_amx_bf16
      OCTAVO_FLOATS(amx_bf16),
#endif
#ifdef OCTAVO_HAS_FLOAT_avx512_bf16
      OCTAVO_FLOATS(avx512_bf16),
#endif
#ifdef OCTAVO_HAS_FLOAT_avx512
      OCTAVO_FLOATS(avx512),
#endif
#ifdef OCTAVO_HAS_FLOAT_avx2
      OCTAVO_FLOATS(avx2),
#endif
      OCTAVO_FLOATS(generic)};
  return built;
}

const std::vector<Built<IntegerIsa>>& built_integers() {
  static const std::vector<Built<IntegerIsa>> built{
#ifdef OCTAVO_HAS_INTEGER_amx_int8
      OCTAVO_INTEGERS(amx_int8),
#endif
#ifdef OCTAVO_HAS_INTEGER_avx512_vnni
      OCTAVO_INTEGERS(avx512_vnni),
#endif
#ifdef OCTAVO_HAS_INTEGER_avx_vnni
      OCTAVO_INTEGERS(avx_vnni),
#endif
#ifdef OCTAVO_HAS_INTEGER_avx512
      OCTAVO_INTEGERS(avx512),
#endif
#ifdef OCTAVO_HAS_INTEGER_avx2
      OCTAVO_INTEGERS(avx2),
#endif
      OCTAVO_INTEGERS(generic)};
  return built;
}

bool has(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

template <class Isa>
Names names_of(const std::vector<Built<Isa>>& isas) {
  Names names;
  for (const auto& isa : isas) names.push_back(isa.name);
  return names;
}

Names common(const Names& names, const Names& others) {
  Names found;
  for (const std::string& name : names)
    if (has(others, name)) found.push_back(name);
  return found;
}

template <class Isa>
Isa tables_of(const std::vector<Built<Isa>>& isas, const std::string& name) {
  return std::find_if(isas.begin(), isas.end(), [&](const auto& isa) { return isa.name == name; })->tables();
}

struct Chosen {
  Chosen(const std::string& floats, const std::string& integers)
      : floats(tables_of(built_floats(), floats)), integers(tables_of(built_integers(), integers)) {}
  FloatIsa floats;
  IntegerIsa integers;
};

// Made when the module is loaded: products ask for it often, and a function's own would be checked each time.
Chosen chosen(available_isas().floats.front(), available_isas().integers.front());

std::string listed(const Names& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

// Throws unless that one of a kind, "floats" or "integers", may be chosen.
void check(const char* kind, const std::string& name, const Names& available, const Names& runs, const Names& known) {
  if (has(available, name)) return;
  const std::string set = "the instruction set '" + name + "' of " + kind;
  if (has(runs, name))
    throw std::invalid_argument("the kernels were not built for " + set + " but for: " + listed(available) +
                                " (in a checkout OCTAVO_ALL_ISAS=1 make kernels builds all)");
  if (has(known, name))
    throw std::invalid_argument("this processor cannot run " + set + "; it can run: " + listed(available));
  throw std::invalid_argument("there is no instruction set '" + name + "' of " + kind + "; there are: " + listed(known));
}

// The names of both kinds that `names` stands for; see choose_isa.
std::pair<std::string, std::string> both_of(const std::string& names, const IsaNames& available) {
  const size_t plus = names.find('+');
  if (plus != std::string::npos) return {names.substr(0, plus), names.substr(plus + 1)};
  bool is_floats = has(available.floats, names), is_integers = has(available.integers, names);
  if (!is_floats && !is_integers) {  // what is wrong with it is said when it is checked
    is_floats = has(kKnown.floats, names);
    is_integers = has(kKnown.integers, names);
  }
  if (!is_floats && !is_integers)
    throw std::invalid_argument("there is no instruction set '" + names + "'; of floats there are: " +
                                listed(kKnown.floats) + "; of integers: " + listed(kKnown.integers));
  return {is_floats ? names : available.floats.front(), is_integers ? names : available.integers.front()};
}

}  // namespace

IsaNames built_isas() { return {names_of(built_floats()), names_of(built_integers())}; }

IsaNames available_isas() {
  const IsaNames built = built_isas(), runs = processor_isas();
  return {common(runs.floats, built.floats), common(runs.integers, built.integers)};
}

const FloatIsa& isa() { return chosen.floats; }

const IntegerIsa& integer_isa() { return chosen.integers; }

std::string chosen_isas() { return isa().name + "+" + integer_isa().name; }

void choose_isa(const std::string& names) {
  const IsaNames available = available_isas(), runs = processor_isas();
  const auto [floats, integers] = both_of(names, available);
  check("floats", floats, available.floats, runs.floats, kKnown.floats);
  check("integers", integers, available.integers, runs.integers, kKnown.integers);
  chosen = Chosen(floats, integers);
}

}  // namespace octavo
