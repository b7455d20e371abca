// Runs every subnet of a file that subnetact.export.to_pt2 wrote, from C++ and without Python.
//
//   run_pt2 model.pt2 cases.pt [threads [repeats]]
//
// cases.pt is torch.save({"inputs": [batches], "outputs": [of every subnet: of every batch], "refused": [batches]})
// from Python; a batch is a list with one tensor per input. Outputs may differ by rounding: 1e-4 of the largest
// value. A batch of "refused" must raise an exception. The program prints latencies and the memory in use.
#include "cases.h"
#include "subnetact_pt2.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <thread>

using Batch = std::vector<at::Tensor>;

Batch batch_of(const c10::IValue& list) {
  Batch tensors;
  for (const c10::IValue& value : list.toListRef()) tensors.push_back(value.toTensor());
  return tensors;
}

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: run_pt2 model.pt2 cases.pt [threads [repeats]]");
  at::set_num_threads(1);
  c10::InferenceMode inference;
  const auto cases = read_cases(argv[2]);
  const auto batches = cases.at("inputs").toListRef(), outputs = cases.at("outputs").toListRef();
  const double before = resident_mib();
  const subnetact::Subnets model(argv[1]);
  const double loaded = resident_mib();
  const size_t count = model.programs.size();
  if (count != outputs.size()) throw std::runtime_error("the cases are of another file");

  const auto equal = [&](size_t subnet, size_t batch) {
    const at::Tensor want = outputs[subnet].toListRef()[batch].toTensor();
    const at::Tensor output = model.run(subnet, batch_of(batches[batch]))[0];
    return output.sizes() == want.sizes() && ((output - want).abs().max() <= 1e-4 * want.abs().max()).item<bool>();
  };
  std::atomic<int> wrong{0};
  for (size_t subnet = 0; subnet < count; ++subnet)
    for (size_t batch = 0; batch < batches.size(); ++batch) wrong += !equal(subnet, batch);
  std::printf("subnets %zu batches %zu wrong %d\n", count, batches.size(), wrong.load());
  std::printf("resident_mib before %.1f loaded %.1f ran %.1f\n", before, loaded, resident_mib());

  int answered = 0;
  const auto refused = cases.at("refused").toListRef();
  const auto refuse = [&](size_t subnet, const Batch& batch) {
    try {
      model.run(subnet, batch);
      ++answered;
      std::cout << "ANSWERED\n";
    } catch (const c10::Error& error) {
      std::cout << "refused: " << error.what_without_backtrace() << "\n";
    }
  };
  for (const c10::IValue& batch : refused) refuse(0, batch_of(batch));
  refuse(count, batch_of(batches[0]));
  refuse(static_cast<size_t>(-1), batch_of(batches[0]));
  refuse(0, Batch(model.inputs.size()));  // tensors that are not defined
  Batch sparse, meta;
  for (const at::Tensor& tensor : batch_of(batches[0])) {
    sparse.push_back(tensor.to_sparse());
    meta.push_back(tensor.to(at::kMeta));
  }
  refuse(0, sparse);
  refuse(0, meta);
  std::printf("bad inputs %zu answered %d\n", refused.size() + 5, answered);

  const int threads = argc > 3 ? std::stoi(argv[3]) : 4, repeats = argc > 4 ? std::stoi(argv[4]) : 0;
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      c10::InferenceMode inference_here;
      at::set_num_threads(1);
      for (size_t i = 0; i < 2 * count; ++i) wrong += !equal((i + t) % count, i % batches.size());
    });
  }
  for (auto& thread : pool) thread.join();
  std::printf("threads %d wrong %d\n", threads, wrong.load());

  for (size_t batch = 0; repeats && batch < batches.size(); ++batch) {
    std::vector<std::vector<double>> ms(count);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (size_t subnet = 0; subnet < count; ++subnet) {  // in turns
        const Batch inputs = batch_of(batches[batch]);
        const auto start = std::chrono::steady_clock::now();
        model.run(subnet, inputs);
        ms[subnet].push_back(
            std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
      }
    }
    for (size_t subnet = 0; subnet < count; ++subnet) {
      std::nth_element(ms[subnet].begin(), ms[subnet].begin() + repeats / 2, ms[subnet].end());
      std::printf("subnet %zu batch %zu median_ms %.3f\n", subnet, batch, ms[subnet][repeats / 2]);
    }
  }
  return wrong || answered ? 1 : 0;
} catch (const c10::Error& error) {
  std::cerr << "run_pt2: " << error.what_without_backtrace() << "\n";
  return 2;
} catch (const std::exception& error) {
  std::cerr << "run_pt2: " << error.what() << "\n";
  return 2;
}
