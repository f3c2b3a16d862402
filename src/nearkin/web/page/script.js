/* The page: one module per part, each imported once, and the start. */
import { guarded } from "./api.js";
import "./camera.js";
import "./compare.js";
import "./explain.js";
import "./explore.js";
import "./find.js";
import "./groups.js";
import "./keys.js";
import "./pad.js";
import "./progress.js";
import { refresh } from "./state.js";
import { open } from "./tabs.js";

document.documentElement.dataset.ready = "";  // every part listens
guarded(async () => { await refresh(); open(location.hash.slice(1)); })();
