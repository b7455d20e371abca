// Reads the cases that the examples compare with, and tells how much memory the process has.
#pragma once
#include <torch/script.h>

#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

// Returns the dictionary that torch.save wrote.
inline c10::Dict<c10::IValue, c10::IValue> read_cases(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return torch::jit::pickle_load(bytes).toGenericDict();
}

// Returns the resident memory of this process in MiB.
inline double resident_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    double kib = 0;
    if (word == "VmRSS:" && status >> kib) return kib / 1024;
  }
  return 0;
}
