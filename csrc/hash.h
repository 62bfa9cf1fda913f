// Row id -> bucket and sign, as sketchoptim/_hashing.py specifies them.
#pragma once

#include <cstdint>

inline int64_t bucket_of(const int64_t* words, int64_t id, int64_t width) {
  const uint64_t mixed = static_cast<uint64_t>(words[0]) * static_cast<uint64_t>(id) +
                         static_cast<uint64_t>(words[1]);
  return static_cast<int64_t>(((mixed >> 32) * static_cast<uint64_t>(width)) >> 32);
}

inline float sign_of(const int64_t* words, int64_t id) {
  const uint64_t mixed = static_cast<uint64_t>(words[2]) * static_cast<uint64_t>(id) +
                         static_cast<uint64_t>(words[3]);
  return (mixed >> 63) ? -1.0f : 1.0f;
}
