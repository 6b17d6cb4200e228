// Linear maps whose weights have one format, as one of which the kernel chooses when it runs: so that their code stands once.
// A stage of linear.h is made of the context C for the work at hand, and knows its number as STAGE_ID.
#pragma once
#include "stages/linear.h"

template <class C, class F, class First, class... Others> struct OneOf {
  C& c;
  const u32 stage;

  template <class Ask> DEVICE auto with(Ask ask) const {
    if constexpr (sizeof...(Others) != 0)
      if (stage != First::STAGE_ID) return OneOf<C, F, Others...>{c, stage}.with(ask);
    return ask(First{c});
  }
  DEVICE Facts facts() const {
    return with([](auto s) { return facts_of(s); });
  }
  DEVICE bool decide(bool ok) const {
    return with([&](auto s) { return s.decide(ok); });
  }
  DEVICE bool exists(int task) const {
    return with([&](auto s) { return s.exists(task); });
  }
  DEVICE Source source(int task) const {
    return with([&](auto s) { return s.source(task); });
  }
  DEVICE auto rows_of(int task, int m) const {
    return with([&](auto s) { return s.rows_of(task, m); });
  }
  DEVICE void ahead(int task, Output to, Kept& kept) const {
    with([&](auto s) { s.ahead(task, to, kept); });
  }
  DEVICE void put(int task, Output to, const f32 (&v)[2][2], Kept& kept) const {
    with([&](auto s) { s.put(task, to, v, kept); });
  }
};
template <class C, class F, class... Stages> DEVICE Facts facts_of(const OneOf<C, F, Stages...>& stages) {
  return stages.facts();
}
