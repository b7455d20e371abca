// Runs the subnets of a .pt2 that subnetact.export.to_pt2 wrote, without Python; their weights are in memory once.
// Compiled code checks no input, so `run` does. What is wrong is a c10::Error, a std::exception, that says why.
#pragma once
#include <c10/util/tempfile.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>
#include <fstream>
#include <regex>
namespace subnetact {
inline std::vector<std::string> parts(const std::string& text, const char* pattern, std::vector<int> groups = {0}) {
  const std::regex regex(pattern);
  return {std::sregex_token_iterator(text.begin(), text.end(), regex, groups), std::sregex_token_iterator()};
}
inline std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> values;
  for (const std::string& number : parts(text, "\\d+")) values.push_back(std::stoll(number));
  return values;
}
struct Subnets {
  using Program = torch::inductor::AOTIModelPackageLoader;
  std::string facts;  // JSON: inputs, subnets, accuracy, fingerprint, frozen, torch, device, capability
  at::DeviceType device = at::kCPU;
  std::vector<std::vector<std::string>> inputs;  // "name:", dtype, and of every axis its size or axis:least:most
  std::vector<std::map<int64_t, std::unique_ptr<Program>>> programs;  // of every subnet by batch size; 0: any other
  explicit Subnets(const std::string& path, size_t runners = 1) {  // so many calls of a program run at once
    caffe2::serialize::PyTorchStreamReader file(path);
    std::map<std::string, at::Tensor> weights;  // whole storages; programs take slices of them
    for (const std::string& name : file.getAllRecords()) {  // the facts come first, weights before their programs
      const auto [data, size] = file.getRecord(name);
      const std::string text(static_cast<const char*>(data.get()), size);
      if (name == "extra/subnetact.json") {
        const auto made = parts(facts = text, "\"(torch|device|capability)\": \"([^\"+]+)", {2});  // in this order
        device = at::Device(made.at(1)).type();
        TORCH_CHECK(made[0] == TORCH_VERSION && (device != at::kCPU || made.at(2) == at::get_cpu_capability()), path, ": torch ",
                    made[0], " compiled it for ", made[2], ", this is torch ", TORCH_VERSION, " on ", at::get_cpu_capability());
        for (const auto& line : parts(text, "\"(\\S+: \\w+( [\\w:]+)+)\"", {1})) inputs.push_back(parts(line, "\\S+"));
      } else if (name.rfind("data/weights/", 0) == 0) {
        weights[name.substr(13)] = torch::jit::pickle_load({text.begin(), text.end()}).toTensor();
      } else if (name.rfind("data/frozen/", 0) == 0) {  // subnet-SUBNET-batch-SIZE.pt2, a package of its own
        const c10::TempFile copy = c10::make_tempfile("subnetact-");
        std::ofstream(copy.name, std::ios::binary) << text << std::flush;
        programs.at(numbers(name)[0])[numbers(name)[1]] = std::make_unique<Program>(copy.name, "model", false, runners);
      } else if (name.find("/weights_config.json") != name.npos) {
        const auto items = parts(text, "\"([^\"]+)\": \\[\"(\\w+)\", \\[(.*?)\\], \\[(.*?)\\], (\\d+)", {1, 2, 3, 4, 5});
        std::unordered_map<std::string, at::Tensor> slices;
        for (auto i = items.begin(); i != items.end(); i += 5)
          slices[i[0]] = weights.at(i[1]).as_strided(numbers(i[2]), numbers(i[3]), std::stoll(i[4]));
        const auto subnet = "subnet-" + std::to_string(programs.size());
        programs.emplace_back()[0] = std::make_unique<Program>(path, subnet, false, runners);
        programs.back()[0]->load_constants(slices, false, true, /*user_managed=*/true);
      }
    }
    TORCH_CHECK(!programs.empty() && !inputs.empty(), path, " is not of subnetact.export.to_pt2");
  }
  // Runs a batch, which is one tensor per input, and returns the tensors of the output.
  std::vector<at::Tensor> run(size_t subnet, std::vector<at::Tensor> batch) const {
    TORCH_CHECK(subnet < programs.size(), "no subnet ", subnet, "; this file has 0..", programs.size() - 1);
    TORCH_CHECK(batch.size() == inputs.size(), batch.size(), " inputs were given, this file takes ", inputs.size());
    std::map<std::string, int64_t> sizes;
    for (size_t i = 0; i < batch.size(); ++i) {
      const auto& [x, wanted] = std::tie(batch[i], inputs[i]);
      bool right = x.defined() && x.layout() == at::kStrided && x.dim() + 2 == static_cast<int64_t>(wanted.size()) &&
                   c10::getDtypeNames(x.scalar_type()).first == wanted[1] && x.device().type() == device;
      for (int64_t axis = 0; right && axis < x.dim(); ++axis) {
        const std::string& limits = wanted[axis + 2];  // "16" and "16:16:16" mean the same
        const int64_t least = std::stoll(limits.substr(limits.find(':') + 1)), most = std::stoll(limits.substr(limits.rfind(':') + 1));
        right = least <= x.size(axis) && x.size(axis) <= most && sizes.emplace(limits, x.size(axis)).first->second == x.size(axis);
      }
      TORCH_CHECK(right, c10::Join(" ", wanted), " is taken on ", device, ", not ", x.toString(), " of shape ", x.defined() ? x.sizes() : at::IntArrayRef());
      batch[i] = x.contiguous();
    }
    const auto frozen = programs[subnet].find(batch[0].size(0));
    return (frozen == programs[subnet].end() ? programs[subnet].at(0) : frozen->second)->run(batch);
  }
};
}  // namespace subnetact
