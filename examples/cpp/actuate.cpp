// Runs every subnet of a file that subnetact.export.to_torchscript wrote, from C++ and without Python.
//
//   actuate model.pt cases.pt [threads [repeats]]
//
// cases.pt is torch.save({"inputs": [...], "outputs": [one per subnet]}) from Python; the outputs are those of
// the subnets' views, computed on one thread, and are compared with torch::equal. The program prints the
// subnets of the file, the choices of its policy, and the time that a switch between subnets takes.
#include "cases.h"

#include <ATen/Parallel.h>
#include <torch/script.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iostream>
#include <thread>
#include <vector>

using torch::jit::IValue;

std::vector<torch::Tensor> tensors(const IValue& list) {
  std::vector<torch::Tensor> found;
  for (const IValue& value : list.toListRef()) found.push_back(value.toTensor());
  return found;
}

double microseconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

double quantile(std::vector<double> values, double share) {
  const auto at = values.begin() + static_cast<long>(share * (values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: actuate model.pt cases.pt [threads [repeats]]");
  at::set_num_threads(1);
  c10::InferenceMode inference;
  torch::jit::Module model = torch::jit::load(argv[1]);
  model.eval();
  const auto cases = read_cases(argv[2]);
  const auto inputs = tensors(cases.at("inputs"));
  const auto outputs = tensors(cases.at("outputs"));
  const int64_t count = model.get_method("num_subnets")({}).toInt();
  if (count != static_cast<int64_t>(outputs.size())) throw std::runtime_error("the cases are of another file");

  const auto run = [&](int64_t subnet) {
    std::vector<IValue> arguments(inputs.begin(), inputs.end());
    arguments.emplace_back(torch::full({1}, subnet, torch::kInt64));
    return model.forward(arguments).toTensor();
  };
  int wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    const torch::Tensor got = run(i);
    const bool equal = torch::equal(got, outputs[i]) && torch::equal(run(i), outputs[i]);
    wrong += !equal;
    if (i < 8 || !equal) {
      std::cout << i << (equal ? " equal " : " DIFFERS ");
      if (!equal) std::cout << "by at most " << (got - outputs[i]).abs().max().item<double>() << " ";
      std::cout << model.get_method("describe")({i}).toStringRef().substr(0, 80) << "\n";
    }
  }
  std::printf("subnets %ld wrong %d\n", static_cast<long>(count), wrong);

  try {
    for (const double slack_ms : {1.0, 5.0, 20.0, 100.0}) {
      const auto choice = model.get_method("choose")({slack_ms, int64_t(8)}).toTuple();
      std::printf("choose slack %.1f queued 8 -> subnet %ld batch %ld\n", slack_ms,
                  static_cast<long>(choice->elements()[0].toInt()),
                  static_cast<long>(choice->elements()[1].toInt()));
    }
  } catch (const std::runtime_error&) {
    std::printf("no latency table\n");
  }

  // What forward does besides the network: decode the number, check it, and find the subnet's size row.
  std::vector<double> decoding;
  for (int64_t i = 0; i < 2000; ++i) {
    const auto subnet = torch::full({1}, i % count, torch::kInt64);
    decoding.push_back(microseconds([&] { model.get_method("select")({subnet, inputs[0].size(0)}); }));
  }
  std::printf("actuate_us %.2f\n", quantile(decoding, 0.5));

  // Each repeat times the first and the last subnet, once after the same subnet and once after the other one.
  std::vector<double> switches, same;
  const int many = argc > 4 ? std::stoi(argv[4]) : 100;
  for (int repeat = 0; repeat < many && count > 1; ++repeat) {
    const int64_t a = 0, b = count - 1;
    run(a);
    const double aa = microseconds([&] { run(a); }), ab = microseconds([&] { run(b); });
    const double bb = microseconds([&] { run(b); }), ba = microseconds([&] { run(a); });
    switches.push_back((ab + ba - aa - bb) / 2);
    same.push_back((aa + bb) / 2);
  }
  if (count > 1) {
    const double spread = quantile(switches, 0.75) - quantile(switches, 0.25);
    std::printf("forward_us %.1f switch_us %.2f +- %.2f\n", quantile(same, 0.5), quantile(switches, 0.5),
                1.57 * spread / std::sqrt(static_cast<double>(switches.size())));
  }

  const int threads = argc > 3 ? std::stoi(argv[3]) : 8;
  std::vector<int> failures(threads, 0);
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      c10::InferenceMode inference_here;
      at::set_num_threads(1);
      for (int64_t i = 0; i < 2 * count; ++i) {
        const int64_t subnet = (i + t) % count;
        failures[t] += !torch::equal(run(subnet), outputs[subnet]);
      }
    });
  }
  for (auto& thread : pool) thread.join();
  for (const int failed : failures) wrong += failed;
  std::printf("threads %d wrong %d\n", threads, wrong);
  return wrong ? 1 : 0;
} catch (const c10::Error& error) {
  std::cerr << "actuate: " << error.what_without_backtrace() << "\n";
  return 2;
} catch (const std::exception& error) {
  std::cerr << "actuate: " << error.what() << "\n";
  return 2;
}
