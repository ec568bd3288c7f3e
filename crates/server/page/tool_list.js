// The tools of the server in the settings: which of them a conversation offers to the model, which were allowed for good, what is not there.

import { visible } from "./calls.js";
import { h } from "./dom.js";
import { page } from "./state.js";

/** The part of the settings about them; nothing where the server has none. */
export function toolsField(talk, set) {
  const servers = page.tools.servers();
  if (!servers.length) return null;
  const off = () => talk.sampling.off ?? [];
  const row = (server, i) => {
    const tools = page.tools.list.filter((tool) => tool.server === server);
    const problems = page.tools.problems.filter((problem) => problem.server === server);
    const box = h("input", { type: "checkbox", id: `set-server-${i}`, checked: !off().includes(server), disabled: !tools.length });
    box.addEventListener("change", () => {
      const rest = off().filter((one) => one !== server);
      const now = box.checked ? rest : [...rest, server];
      set("off", now.length ? now : undefined);
    });
    const name = server ? `MCP server ${visible(server)}` : "Of Kiln itself";
    const list = h("ul", {}, tools.map((tool) => h("li", {}, h("code", {}, visible(tool.tool)), ` ${visible(tool.description).slice(0, 200)}`)));
    const details = tools.length > 0 && h("details", {}, h("summary", {}, `${tools.length} tool${tools.length > 1 ? "s" : ""}`), list);
    return h("div", { class: "server" }, h("label", { htmlFor: box.id }, box, ` ${name}`), details, problems.map(({ why }) => h("p", { class: "note" }, visible(why))));
  };
  const allowed = page.tools.forGood();
  const forget = h("button", { type: "button", id: "tools-forget", hidden: !allowed.length, onclick: () => {
    page.tools.forget();
    forget.hidden = true;
  } }, "Ask again before every call");
  return h("div", { class: "setting wide", role: "group", "aria-label": "Tools of the server" }, h("h3", {}, "Tools of the server"), servers.map(row), h("p", {}, "The model may call them. You are asked before each call of an MCP server, unless you or the server said always."), forget);
}
