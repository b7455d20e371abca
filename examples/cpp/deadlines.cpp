// Answers requests by their deadlines with a file that subnetact.export.to_torchscript(..., slo_ms=) wrote.
//
//   deadlines model.pt cases.pt outcomes.csv [margin]
//
// cases.pt is torch.save({"inputs": [...], "outputs": [...], "arrivals_ms": t, "slo_ms": s, "min_accuracy": a})
// from Python: tensors with a row per sample, the output of every subnet for them, and float64 tensors of
// shape (N,): when each request arrives, the time it has, ms, and the accuracy it needs, percent. Request i asks
// for sample i modulo their number, at its time, whether earlier ones are answered or not. Written is a line per
// request: met, late or refused, the subnet, the time from arrival to answer, ms, and the size and the time of its
// batch. A request is refused if
// no subnet that is accurate enough can answer it in time any more. `margin` is the share by which latencies are
// assumed to be longer than measured, 0.1 for example. This program is one worker.
#include "cases.h"

#include <ATen/Parallel.h>
#include <torch/script.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <limits>
#include <set>
#include <thread>
#include <vector>
#ifdef __GLIBC__
#include <malloc.h>
#endif

using Clock = std::chrono::steady_clock;
using torch::jit::IValue;

std::vector<torch::Tensor> tensors(const IValue& list) {
  std::vector<torch::Tensor> values;
  for (const IValue& value : list.toListRef()) values.push_back(value.toTensor());
  return values;
}

std::vector<double> numbers(const IValue& value) {
  const torch::Tensor flat = value.toTensor().to(torch::kFloat64).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

struct Answer {
  std::vector<int64_t> requests;
  int64_t subnet;
  torch::Tensor output;
  double taken_ms;
};

int main(int argc, char** argv) try {
  if (argc < 4) throw std::runtime_error("usage: deadlines model.pt cases.pt outcomes.csv [margin]");
  const double margin = argc > 4 ? std::stod(argv[4]) : 0.0;
#ifdef __GLIBC__  // Keep the memory of activations: malloc gives it back after every batch, and it costs page faults.
  mallopt(M_MMAP_THRESHOLD, 1 << 25);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
  c10::InferenceMode inference;
  torch::jit::Module model = torch::jit::load(argv[1]);
  model.eval();
  const auto facts = model.attr("facts").toGenericDict();
  at::set_num_threads(std::stoi(facts.at("threads").toStringRef()));  // The latencies were measured with these.
  const auto sizes = model.attr("batch_sizes").toIntVector();
  const auto accuracy = model.attr("accuracy").toDoubleVector();
  std::vector<double> least_ms(accuracy.size(), std::numeric_limits<double>::infinity());
  for (size_t i = 0; i < accuracy.size() && !sizes.empty(); ++i)
    for (const double ms : model.attr("latency_ms").toListRef()[i].toDoubleVector())
      if (ms < least_ms[i]) least_ms[i] = ms;  // NaN marks what did not run.

  const auto cases = read_cases(argv[2]);
  const auto inputs = tensors(cases.at("inputs")), outputs = tensors(cases.at("outputs"));
  const auto arrivals = numbers(cases.at("arrivals_ms")), slo = numbers(cases.at("slo_ms"));
  const auto floors = numbers(cases.at("min_accuracy"));
  std::vector<double> fastest_ms(arrivals.size(), std::numeric_limits<double>::infinity());
  for (size_t request = 0; request < arrivals.size(); ++request)
    for (size_t i = 0; i < accuracy.size(); ++i)
      if (accuracy[i] >= floors[request]) fastest_ms[request] = std::min(fastest_ms[request], least_ms[i]);
  const double longest_ms = arrivals.empty() ? 0 : *std::max_element(fastest_ms.begin(), fastest_ms.end());
  const int64_t samples = inputs[0].size(0), count = static_cast<int64_t>(arrivals.size());

  const auto run = [&](int64_t subnet, const std::vector<int64_t>& requests) {
    std::vector<int64_t> rows;
    for (const int64_t request : requests) rows.push_back(request % samples);
    std::vector<IValue> arguments;
    for (const auto& input : inputs) arguments.emplace_back(input.index_select(0, torch::tensor(rows)));
    arguments.emplace_back(torch::full({1}, subnet, torch::kInt64));  // on the CPU: the file reads the number
    return model.forward(arguments).toTensor();
  };
  const auto choose = [&](double slack_ms, int64_t queued, double floor) {
    const auto choice = model.get_method("choose")({slack_ms, queued, floor}).toTuple();
    return std::pair<int64_t, int64_t>{choice->elements()[0].toInt(), choice->elements()[1].toInt()};
  };
  for (int repeat = 0; repeat < 3; ++repeat) {  // TorchScript optimises in the first calls of a process.
    for (size_t subnet = 0; subnet < accuracy.size(); ++subnet)
      for (const int64_t size : sizes)
        if (repeat == 0 || size == sizes.front()) run(subnet, std::vector<int64_t>(size, 0));
    choose(1.0, 1, 0.0);
  }

  const auto start = Clock::now();
  const auto now_ms = [&] { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); };
  std::set<std::pair<double, int64_t>> queue;  // (deadline, request): the most urgent one comes first
  std::vector<Answer> answers;
  std::vector<double> ended_ms(count, std::numeric_limits<double>::quiet_NaN());
  std::vector<double> choosing_us;
  for (int64_t arrived = 0; arrived < count || !queue.empty();) {
    double now = now_ms();
    for (; arrived < count && arrivals[arrived] <= now; ++arrived)
      queue.emplace(arrivals[arrived] + slo[arrived], arrived);
    // Drop what no subnet can answer in time any more.
    for (auto next = queue.begin(); next != queue.end() && next->first < now + longest_ms;)
      next = next->first < now + fastest_ms[next->second] ? queue.erase(next) : std::next(next);
    if (queue.empty()) {
      if (arrived < count)
        std::this_thread::sleep_until(start + std::chrono::duration<double, std::milli>(arrivals[arrived]));
      continue;
    }
    const double before = now_ms();
    const auto [deadline, first] = *queue.begin();
    const auto [subnet, size] =
        choose((deadline - now) / (1.0 + margin), static_cast<int64_t>(queue.size()), floors[first]);
    choosing_us.push_back(1e3 * (now_ms() - before));
    Answer answer{{}, subnet, {}, 0};
    for (auto next = queue.begin(); next != queue.end() && static_cast<int64_t>(answer.requests.size()) < size;) {
      const bool enough = accuracy[subnet] >= floors[next->second];
      if (enough) answer.requests.push_back(next->second);
      next = enough ? queue.erase(next) : std::next(next);
    }
    const double begun = now_ms();
    answer.output = run(subnet, answer.requests);
    now = now_ms();
    answer.taken_ms = now - begun;
    for (const int64_t request : answer.requests) ended_ms[request] = now;
    answers.push_back(std::move(answer));
  }

  // Outputs are compared afterwards: a batch may differ from single samples by rounding.
  std::vector<const Answer*> answer_of(count, nullptr);
  int64_t wrong = 0, met = 0, refused = 0;
  for (const Answer& answer : answers) {
    for (size_t row = 0; row < answer.requests.size(); ++row) {
      const int64_t request = answer.requests[row];
      const auto expected = outputs[answer.subnet][request % samples], got = answer.output[row];
      wrong += !torch::allclose(got, expected, 1e-4, 1e-4 * expected.abs().max().item<double>());
      wrong += answer_of[request] != nullptr;
      answer_of[request] = &answer;
    }
  }
  std::ofstream outcomes(argv[3]);
  outcomes << "request,outcome,subnet,ms,batch_size,batch_ms\n";
  for (int64_t request = 0; request < count; ++request) {
    const Answer* answer = answer_of[request];
    const double taken_ms = ended_ms[request] - arrivals[request];
    const bool in_time = answer && taken_ms <= slo[request];
    refused += answer == nullptr;
    met += in_time;
    outcomes << request << "," << (!answer ? "refused,-1,,," : in_time ? "met," : "late,");
    if (answer) outcomes << answer->subnet << "," << taken_ms << "," << answer->requests.size() << ",";
    if (answer) outcomes << answer->taken_ms;
    outcomes << "\n";
  }
  std::sort(choosing_us.begin(), choosing_us.end());
  std::printf("requests %ld met %ld refused %ld batches %zu wrong %ld choose_us %.2f\n", static_cast<long>(count),
              static_cast<long>(met), static_cast<long>(refused), answers.size(), static_cast<long>(wrong),
              choosing_us.empty() ? 0.0 : choosing_us[choosing_us.size() / 2]);
  return wrong || !outcomes ? 1 : 0;
} catch (const std::exception& error) {  // also c10::Error and torch::jit::JITException
  std::cerr << "deadlines: " << error.what() << "\n";
  return 2;
}
