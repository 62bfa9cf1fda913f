// Row id -> bucket and sign, as sketchoptim/_hashing.py specifies them.
#pragma once

#include <cstdint>

// The fixed bijection that every id goes through first. It does not depend on the hash row, so a
// loop over hash rows calls it once.
inline uint64_t mix_id(int64_t id) {
  uint64_t x = static_cast<uint64_t>(id);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

inline int64_t bucket_of(const int64_t* words, uint64_t mixed, int64_t width) {
  const uint64_t u = static_cast<uint64_t>(words[0]) * mixed + static_cast<uint64_t>(words[1]);
  return static_cast<int64_t>(((u >> 32) * static_cast<uint64_t>(width)) >> 32);
}

inline float sign_of(const int64_t* words, uint64_t mixed) {
  const uint64_t u = static_cast<uint64_t>(words[2]) * mixed + static_cast<uint64_t>(words[3]);
  return (u >> 63) ? -1.0f : 1.0f;
}
