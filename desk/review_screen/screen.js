// The review screen. What a person does here is shown at once and stored in this browser. It is sent again and again
// until the desk has answered.
//
// Each time the desk has drawn the page, Streamlit calls the function at the end of this file with the desk's data. Of
// the messages that are sent between two calls, Streamlit passes on only the last one. So every message holds all acts
// that have no answer yet.
//
// Everything that a person wrote is put into the page as text, never as HTML. The desk joins work.js and this file into
// one script, work.js first.

const ON_ITS_WAY = "The grade is on its way.";
const ONCE_MORE = "Nothing is changed here: once more accepts it as it is.";
const SUMMARY = "";
const REQUESTS = " requests";
const MORE = " more";
const REMOVED = "removed";
const SHARED_ACCOUNTS = ["root", "admin", "administrator", "ubuntu", "user", "pi"]; // no person's name
const PAUSE_MS = 600; // after a pause of this length, a typed number is complete
const SEND_MS = 25; // a message is sent after this delay, so that it covers several keys
const RETRY_MS = [3000, 6000, 12000];
const GLANCE_MS = 400; // too short to read a submission, so a key that is pressed twice does not decide on the next one
const LONGEST_PRESS_MS = 1500;
const MOST_KEPT = 40; // number of submissions that stay in memory, so that going back needs no loading
const SHARES = 6;
const MOST_FOUND = 9;
const LONGEST_LINE = 160;

const RULE = "Keys act on the open criterion, and it stays open: only ↑, ↓ or a click opens another one.";
const MISQUOTED = {
  "not found": "The model quoted this; it is not in the work:",
  "not their own": "The model quoted this; it is only in what the students were given:",
};
const KEYS = [
  ["0 to 9", "so many points; 1 and then 2 within half a second are 12. The model's points, given again, settle a doubt"],
  [".", "half a point more: 3 and then . are 3.5"],
  ["-", "pressed before the digit, where points are taken off: - and then 2 are −2"],
  ["↑ ↓", "open the criterion above, or below"],
  ["Enter", "save the change, and on to the next submission; with nothing changed, accept. In a field: end writing"],
  ["a", "save the change if there is one, accept the rest of the grade, and on to the next"],
  ["r", "another reason for the change, from the list"],
  ["c", "a comment that was used before, or that the model wrote often, from the list"],
  ["e", "write the comment: typing replaces the old one; Shift Enter is a new line"],
  ["y n", "where a changed comment is on other submissions too: change it on those that are ticked, or leave it"],
  ["x", "leave the feedback out"],
  ["z", "discard what is not saved, or undo the last save; asks first if you have gone elsewhere since"],
  ["g", "the next submission that needs a person"],
  ["j k", "the next, or the previous, submission"],
  ["s", "choose which submissions are shown"],
  ["/", "find a submission"],
  ["Space", "scroll the work; with Shift, back"],
  ["Esc", "leave the field or the button, or close the list"],
  ["Ctrl Enter", "save and go on, from a field as well"],
  ["?", "this list"],
];

const show = (points) => (points === null || points === undefined ? "–" : String(points));
const isText = (element) =>
  !!element?.matches?.("textarea, select, [contenteditable], input:not([type=checkbox], [type=radio], [type=button])");

class Screen {
  constructor() {
    this.sender = [...crypto.getRandomValues(new Uint32Array(3))].map((number) => number.toString(36)).join("");
    this.acted = 0; // the number of the last act
    this.sent = 0; // the number of the last message
    this.heard = 0; // the number of the last message that the desk has answered
    this.told = {}; // number of a message without an answer -> the submission that it named
    this.sentAt = 0;
    this.tries = 0;
    this.classes = {}; // the data of each class, by batch
    addEventListener("keydown", (event) => this.onKey(event), true);
    addEventListener("resize", () => this.fit());
    addEventListener("online", () => this.send());
    addEventListener("click", (event) => this.onClick(event), true);
    // A press becomes a click only if its element still exists when the press ends. So nothing is redrawn until then.
    addEventListener("pointerdown", () => {
      this.isByPointer = this.isRoaming = true;
      this.isNewcomer = false;
      this.pressedAt = performance.now();
    }, true);
    for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => this.endPress(), true);
    // After a person has scrolled, `keepInView` does nothing until they press a key or open something.
    for (const roam of ["wheel", "touchmove"]) addEventListener(roam, () => { this.isRoaming = true; }, { capture: true, passive: true });
    setInterval(() => this.retry(), 500);
  }

  // --- receiving data from the desk

  receive(data, setStateValue, parent) {
    this.setStateValue = setStateValue;
    if (this.batch !== data.batch) this.begin(data);
    this.data = { ...data, ...this.classOf(data) };
    for (const [id, content] of Object.entries(data.submissions)) this.cache.set(id, { ...this.cache.get(id), ...content });
    const [sender, number] = data.heard;
    if (sender === this.sender) {
      this.heard = Math.max(this.heard, number);
      if (this.heard === this.sent) this.tries = 0;
    }
    const root = parent.querySelector(".kv");
    const isNew = root !== this.root;
    if (isNew) this.mount(root);
    this.takeAnswers(data.answers);
    const isKnown = this.heard === this.sent && !this.isUntold;
    if (isKnown) this.hasMoved = false;
    if (this.isLed(data, isKnown)) {
      if (data.show !== this.show) this.queue = [];
      this.show = data.show;
      if (data.current !== this.shown) this.enter(data.current);
      this.later(); // reports this place; `led` is true as long as the last message names another one
    }
    if (isNew) this.showSomething();
    // If Back was pressed again, the address is ahead of the desk's data. The desk learns of that without a message.
    const isBehind = this.addressed() && this.addressed() !== data.current;
    if ((isNew && !isKnown) || (isKnown && data.current !== this.shown && !isBehind)) this.later();
    this.takeSame(...data.same);
    this.extendQueue();
    this.render();
    this.whenNeeded();
  }

  /**
   * Whether to go to the place in the desk's data. This is so at the start, and once each time that the address (Back,
   * a link) or another page leads to a new place. A place that this screen has reported itself does not count, because
   * the person has possibly moved on since. Nor does a place that differs from the address, because a run of Streamlit
   * can still have the address from before the last step.
   */
  isLed({ heard, current, show, led }, isKnown) {
    const lead = `${heard} ${current} ${show}`;
    for (const number of Object.keys(this.told)) if (number <= this.heard) delete this.told[number];
    const address = this.addressed();
    const isNewLead = led && lead !== this.lead && (heard[0] === this.sender || isKnown);
    const mayFollow = isNewLead && (!address || address === current) && !Object.values(this.told).includes(current);
    if (this.shown !== null && this.data.people[this.shown] && !mayFollow) return false;
    this.lead = lead;
    return true;
  }

  /** The submission in the address. Back changes the address before the desk learns of it. */
  addressed() {
    return new URLSearchParams(location.search).get("submission");
  }

  /** If the chosen queue is empty by now, show another queue, and say so. */
  showSomething() {
    const isEmpty = (name) => !this.data.queues[name].some((id) => this.belongs(id));
    const full = ["needs review", "asked for another look", "all"].find((name) => !isEmpty(name));
    if (!isEmpty(this.show) || !full) return;
    this.status = `Nobody is left in “${this.show}”: “${full}” is shown.`;
    this.show = full;
    this.queue = [];
    this.hasMoved = true;
    this.later();
  }

  /** The class: the parts that the desk has just sent, and all other parts as they were sent before. */
  classOf({ batch, parts, digests }) {
    const known = (this.classes[batch] ??= { parts: {}, digests: {} });
    Object.assign(known.parts, parts);
    known.digests = Object.fromEntries(Object.keys(known.parts).map((name) => [name, digests[name]]));
    if (parts.people || parts.open || parts.queues) {
      const { people, open, queues } = known.parts;
      known.people = Object.fromEntries(people.map(([id, name, section, doubts]) => [id, { name, section, doubts, criteria: open[id] || [] }]));
      known.queues = { ...queues, all: people.map(([id]) => id) };
    }
    const { criteria, phrases, reviewers, standing } = known.parts;
    return { criteria, phrases, reviewers, standing, people: known.people, queues: known.queues };
  }

  begin(data) {
    this.batch = data.batch;
    this.prefix = `kvasir ${data.batch} `;
    this.cache = new Map();
    this.own = {}; // by submission: the versions before and after acts of this page, if nobody else decided in between
    this.drafts = this.stored("draft ");
    this.texts = this.stored("text "); // replies and requests that are being written
    this.acts = [];
    this.adoptActs();
    this.undoable = JSON.parse(sessionStorage.getItem(this.prefix + "undo") || "[]");
    this.settings = { order: "", share: "", blind: false, ...this.stored("settings")[""] };
    this.show = data.show;
    this.shown = null;
    this.queue = [];
    this.refusals = [];
    this.same = null;
    this.failure = this.whole = this.prompts = this.status = "";
    this.entry = null;
  }

  stored(kind) {
    const found = {};
    try {
      for (const key of Object.keys(localStorage))
        if (key.startsWith(this.prefix + kind)) found[key.slice((this.prefix + kind).length)] = JSON.parse(localStorage[key]);
    } catch {
      // This browser stores nothing. Acts that are not sent yet are then lost when the page is closed.
    }
    return found;
  }

  store(key, value) {
    try {
      if (value === undefined) localStorage.removeItem(this.prefix + key);
      else localStorage.setItem(this.prefix + key, JSON.stringify(value));
    } catch {
      // This browser stores nothing, as in `stored`.
    }
  }

  /**
   * Take over the acts that other pages of this browser could not send, for example before a reload. If an act is sent
   * twice, the desk does it once.
   */
  adoptActs() {
    const known = new Set(this.acts.map(idOf));
    for (const act of Object.values(this.stored("act "))) if (!known.has(idOf(act))) this.acts.push(act);
    this.acts.sort((one, other) => (one.sender === other.sender ? one.number - other.number : one.sender < other.sender ? -1 : 1));
  }

  takeAnswers(answers) {
    this.failure = "";
    for (const act of [...this.acts]) {
      const answer = answers[idOf(act)];
      if (!answer) continue;
      if (answer.state === "failed") {
        this.failure = answer.why;
        continue;
      }
      this.acts = this.acts.filter((other) => other !== act);
      this.store(`act ${idOf(act)}`, undefined);
      if (answer.state === "kept") this.settle(act, answer.version);
      else this.giveBack(act, answer);
    }
  }

  /** The desk has kept the act. Apply it here too, because the desk does not always send the submission again. */
  settle(act, version) {
    if (act.kind === "reply") return this.setText(`reply ${act.request_id}`, undefined);
    if (act.kind === "ask") return this.setText(`ask ${act.item_id}`, undefined);
    const own = this.own[act.item_id];
    this.own[act.item_id] = { versions: own?.versions.has(act.version) ? own.versions : new Set([act.version]), last: version };
    this.own[act.item_id].versions.add(version);
    const base = this.cache.get(act.item_id);
    if (!base?.criteria || base.version === version) return;
    applyAct(base, act);
    base.version = version;
  }

  /**
   * Take the list of other submissions that have the comment that was changed here. The change is offered for each of
   * them on which nobody else has decided. None is ticked at first, because the new comment possibly suits one student.
   */
  takeSame(of, places) {
    if (!this.same || this.same.places || of[0] !== this.same.id || of[1] !== this.same.from) return;
    const others = places.filter(([item]) => item !== this.same.item);
    this.same = others.length ? { ...this.same, places: others, ticked: new Set() } : null;
  }

  changeSame() {
    if (!this.same?.places) return this.say("There is no comment to change on other submissions.");
    const free = this.same.places.filter(([item]) => this.same.ticked.has(item));
    if (!free.length) return this.say("None is ticked: tick those that get the new comment, or press n.");
    if (this.asksName()) return;
    const { id, to, reason } = this.same;
    const group = `${this.sender} ${this.acted}`;
    for (const [item, version] of free) {
      const changes = { [id]: { feedback: to, reason } };
      this.remember(this.act("decide", { item_id: item, version, seen: [], changes }), null, { group });
    }
    this.same = null;
    this.status = `The comment is changed on ${free.length} more.`;
    this.render();
    this.later();
  }

  leaveSame() {
    if (!this.same?.places) return this.say("There is no comment to leave on other submissions.");
    this.same = null;
    this.renderAlert();
  }

  giveBack(act, answer) {
    if (answer.state === "refused") this.refusals.push(`${this.name(act.item_id)}: ${answer.why}`);
    const written = this.texts[`reply ${act.request_id}`];
    // The text is kept without `seen`, because the person now sees the new reply.
    if (act.kind === "reply" && written) this.setText(`reply ${act.request_id}`, { text: written.text });
    if (act.kind === "undo") {
      if (answer.state === "conflict")
        this.refusals.push(`${this.name(act.item_id)}: somebody has decided since; nothing was undone.`);
      return;
    }
    this.undoable = this.undoable.filter((entry) => entry.id !== idOf(act));
    if (act.kind === "accept" && answer.state === "refused" && !Object.keys(act.changes || {}).length) return;
    if (act.kind !== "decide" && act.kind !== "accept") return;
    const draft = this.drafts[act.item_id];
    this.setDraft(act.item_id, {
      version: act.version,
      seen: act.seen,
      accept: act.kind === "accept",
      changes: { ...act.changes, ...draft?.changes },
    });
  }

  // --- sending messages to the desk

  act(kind, fields) {
    this.acted += 1;
    const base = this.cache.get(fields.item_id);
    const act = { sender: this.sender, number: this.acted, kind, version: base?.version || "", seen: base?.decisions || [], ...fields };
    act.by = this.yourName;
    this.acts.push(act);
    this.store(`act ${idOf(act)}`, act);
    return act;
  }

  later() {
    this.isUntold = true;
    this.timer ??= setTimeout(() => this.send(), SEND_MS);
  }

  send() {
    clearTimeout(this.timer);
    this.timer = undefined;
    if (!this.setStateValue || !this.root?.isConnected) return;
    this.adoptActs();
    if (this.heard === this.sent) this.waitingSince = performance.now();
    this.isUntold = false;
    this.sent += 1;
    // After Back, the message names no submission. If it named the one that Back has left, it would undo Back.
    const hasLeft = !this.hasMoved && this.addressed() && this.addressed() !== this.shown;
    this.told[this.sent] = hasLeft ? "" : this.shown;
    this.sentAt = performance.now();
    const have = {};
    for (const [id, content] of this.cache) if (content.work) have[id] = content.workVersion;
    this.setStateValue("message", {
      sender: this.sender,
      number: this.sent,
      submission: hasLeft ? "" : this.shown,
      show: hasLeft ? "" : this.show,
      name: this.yourName,
      blind: !!this.settings.blind,
      near: this.near(),
      have,
      parts: this.classes[this.batch].digests,
      whole: this.whole,
      prompts: this.prompts,
      same: this.same ? [this.same.id, this.same.from] : [],
      acts: this.acts.map(({ seen, before, ...act }) => act),
    });
  }

  retry() {
    if (!this.root?.isConnected) return;
    if (this.isStale) this.render();
    const isUnanswered = this.heard !== this.sent || this.acts.length > 0;
    const wait = RETRY_MS[Math.min(this.tries, RETRY_MS.length - 1)];
    if (isUnanswered && performance.now() - this.sentAt > wait) {
      this.tries += 1;
      this.send();
    }
    const isLost = this.heard !== this.sent && performance.now() - this.waitingSince > 5000;
    if (isLost !== this.isLost) {
      this.isLost = isLost;
      this.renderAlert();
    }
  }

  /** Ask the desk for the shown submission and those near it, if they are not here. Drop others if there are many. */
  whenNeeded() {
    const wanted = [this.shown, ...this.near()];
    const isMissing = wanted.some((id) => !this.cache.get(id)?.criteria) || !this.cache.get(this.shown)?.work;
    if (this.heard === this.sent && isMissing) this.later();
    for (const id of this.cache.keys()) {
      if (this.cache.size <= MOST_KEPT) break;
      if (!wanted.includes(id)) this.cache.delete(id);
    }
  }

  // --- moving between submissions

  name(id) {
    return this.settings.blind ? id.slice(0, 8) : this.data.people[id]?.name || id.slice(0, 8);
  }

  isMine(id) {
    if (this.settings.share.startsWith("section ")) return `section ${this.data.people[id]?.section}` === this.settings.share;
    const [number, total] = this.settings.share.split("/").map(Number);
    if (!total) return true;
    this.places ??= new Map(this.data.queues.all.map((each, place) => [each, place]));
    return this.places.get(id) % total === number - 1;
  }

  belongs(id) {
    const criterion = this.settings.order;
    return this.isMine(id) && (!criterion || this.show !== "needs review" || this.data.people[id]?.criteria.includes(criterion));
  }

  /** Update the queue. A decision does not move a submission in it, and submissions that join it later come last. */
  extendQueue() {
    this.places = undefined;
    const known = new Set(this.queue);
    const isFirst = !this.queue.length;
    this.queue = this.queue.filter((id) => this.data.people[id]);
    this.queue.push(...this.data.queues[this.show].filter((id) => !known.has(id) && this.belongs(id)));
    if (this.shown && !this.queue.includes(this.shown)) {
      this.queue.push(this.shown);
      if (isFirst) {
        const all = new Map(this.data.queues.all.map((id, place) => [id, place]));
        const rank = (id) => (this.show === "needs review" ? -this.data.people[id].doubts : 0);
        this.queue.sort((one, other) => rank(one) - rank(other) || all.get(one) - all.get(other));
      }
    }
  }

  isFree(id) {
    return !this.data.elsewhere.includes(id);
  }

  ahead(step) {
    const at = this.queue.indexOf(this.shown);
    const others = step > 0 ? this.queue.slice(at + 1) : this.queue.slice(0, at).reverse();
    return others.filter((id) => this.isFree(id));
  }

  /** The submissions that wait for a decision: first those after the shown one, then those before it. */
  waiting() {
    const decided = new Set(this.acts.filter(({ kind }) => kind === "decide" || kind === "accept").map((act) => act.item_id));
    const all = this.data.queues["needs review"];
    const queued = new Set(this.queue);
    const order = [...this.queue, ...all.filter((id) => !queued.has(id))];
    const at = order.indexOf(this.shown);
    const waits = new Set(all);
    return [...order.slice(at + 1), ...order.slice(0, at)].filter(
      (id) => waits.has(id) && !decided.has(id) && this.belongs(id) && this.isFree(id));
  }

  near() {
    const [after, before, waiting] = [this.ahead(1), this.ahead(-1), this.waiting()];
    const first = [...after.slice(0, 2), ...before.slice(0, 1), ...waiting.slice(0, 1)];
    return [...new Set([...first, ...after.slice(2, 9), ...before.slice(1, 4), ...waiting.slice(1, 3)])];
  }

  move(step) {
    const [id] = this.ahead(step);
    if (id) this.go(id);
    else this.say(step > 0 ? "There is none after this one." : "There is none before this one.");
  }

  go(id, status = "") {
    this.hasMoved = true;
    this.enter(id);
    this.status = status;
    this.render();
    this.later();
  }

  enter(id) {
    this.endEntry();
    // An open list belongs to the previous submission, and so does a text field with the focus.
    if (!this.over.hidden) this.close();
    if (this.grade.contains(document.activeElement) && isText(document.activeElement)) this.root.focus({ preventScroll: true });
    this.shown = id;
    this.enteredAt = performance.now();
    this.active = null;
    this.isRoaming = false;
    this.isNewcomer = true; // the person has done nothing on this submission yet
    this.whole = this.prompts = this.asked = "";
    this.seeksQuote = false;
    this.status = "";
    this.extendQueue();
  }

  /** Once something is changed or the page is left, Enter accepts nothing "as it is" any more. */
  endQuestion() {
    if (this.status === ONCE_MORE) this.status = "";
  }

  say(words) {
    this.status = words;
    this.renderFoot();
    this.keepInView();
  }

  // --- showing, changing and saving a grade

  /** The submission as it is shown: the desk's data, changed by the acts without an answer and by the unsaved draft. */
  state(id = this.shown) {
    const base = this.cache.get(id);
    if (!base?.criteria) return this.blankState();
    const state = { ...base, criteria: base.criteria.map((criterion) => ({ ...criterion })) };
    for (const act of this.acts) if (act.item_id === id) applyAct(state, act);
    state.saved = { summary: state.summary, points: {}, feedback: {} };
    for (const criterion of state.criteria) {
      state.saved.points[criterion.id] = criterion.points;
      state.saved.feedback[criterion.id] = criterion.feedback;
    }
    const draft = this.drafts[id];
    if (draft) applyChanges(state, draft.changes);
    return state;
  }

  /** What is shown until the desk has sent the grade: the criteria of the class, without points. */
  blankState() {
    const blank = { points: null, model: null, evidence: "", feedback: "", written: "", likelihoods: "", reason: "…", doubts: [] };
    const none = { requests: [], decisions: [], remarks: [], summary: "", points: "", max: "…", kind: "waiting", state: "…" };
    return { ...none, isBlank: true, criteria: this.data.criteria.map((criterion) => ({ ...criterion, ...blank })) };
  }

  rowsOf(state) {
    return [...(state.requests.length ? [REQUESTS] : []), ...state.criteria.map(({ id }) => id), SUMMARY, MORE];
  }

  ensureActive(state) {
    const rows = this.rowsOf(state);
    if (rows.includes(this.active)) return;
    const doubtful = this.data.people[this.shown]?.criteria || [];
    const open = state.criteria.find(({ id }) => doubtful.includes(id)) || state.criteria.find(({ doubts }) => doubts.length);
    const wanted = this.settings.order;
    const isAsked = state.requests.some(({ reply }) => reply === null);
    this.active = rows.includes(wanted) && wanted ? wanted : isAsked ? REQUESTS : (open || state.criteria[0])?.id ?? SUMMARY;
  }

  change(id, fields) {
    const state = this.state();
    if (state.isBlank) return;
    const base = this.cache.get(this.shown);
    const draft = this.drafts[this.shown] || { version: base.version, seen: base.decisions, changes: {} };
    const change = { ...draft.changes[id], ...fields };
    this.changedAt = performance.now();
    this.endQuestion();
    const isSame = (name, saved) => change[name] === undefined || change[name] === saved;
    const savedFeedback = id === SUMMARY ? state.saved.summary : state.saved.feedback[id];
    const settlesDoubt = change.points !== undefined && this.data.people[this.shown]?.criteria.includes(id);
    if (isSame("points", state.saved.points[id]) && isSame("feedback", savedFeedback) && !settlesDoubt) delete draft.changes[id];
    else draft.changes[id] = change;
    this.setDraft(this.shown, Object.keys(draft.changes).length ? draft : undefined);
  }

  setDraft(id, draft) {
    if (draft) this.drafts[id] = draft;
    else delete this.drafts[id];
    this.store(`draft ${id}`, draft);
  }

  setText(key, text) {
    if (text === undefined) delete this.texts[key];
    else this.texts[key] = text;
    this.store(`text ${key}`, text);
  }

  reasons(id) {
    const change = this.drafts[this.shown]?.changes[id];
    const lists = this.data.phrases.reasons[id] || this.data.phrases.reasons[SUMMARY];
    const model = this.cache.get(this.shown)?.criteria.find((criterion) => criterion.id === id)?.model;
    const points = change?.points;
    const reworded = lists.reworded.filter((reason) => reason !== REMOVED);
    const isRemoved = change?.feedback?.trim() === "";
    if (points === undefined || (points === model && change.feedback !== undefined)) return isRemoved ? [REMOVED, ...reworded.slice(0, 8)] : reworded;
    return points === model ? lists.confirmed : model !== null && points < model ? lists.lowered : lists.raised;
  }

  reason(id) {
    return this.drafts[this.shown]?.changes[id]?.reason || this.reasons(id)[0];
  }

  /** Whether somebody else has decided on the submission since its draft was begun. */
  isConflict(id) {
    const draft = this.drafts[id];
    const version = this.cache.get(id)?.version;
    const own = this.own[id];
    return !!draft && version !== undefined && draft.version !== version && !(own?.last === version && own.versions.has(draft.version));
  }

  /** Save the changes, and go on. The rest is accepted too if `acceptsRest` is true, or if nothing is changed. */
  save(acceptsRest = false) {
    this.endEntry();
    const draft = this.drafts[this.shown];
    const changes = {};
    for (const [id, change] of Object.entries(draft?.changes || {})) changes[id] = { ...change, reason: this.reason(id) };
    const isChanged = Object.keys(changes).length > 0;
    const accepts = acceptsRest || !isChanged;
    const problem = this.whyNot(isChanged, accepts);
    if (problem) return this.say(problem);
    if (this.asksName()) return;
    const before = this.state().saved;
    for (const [id, { feedback, points, reason }] of Object.entries(changes)) {
      const from = before.feedback[id];
      // If the points are changed too, the comment is not offered elsewhere, because it belongs to the new points. A
      // summary is not offered either, because it speaks of one student's work.
      if (feedback && from && feedback !== from && points === undefined) this.same = { id, from, to: feedback, reason, item: this.shown };
    }
    const isLast = !this.ahead(1).length;
    const left = isChanged ? this.unfinished(true, accepts) : "";
    const seen = draft && { version: draft.version, seen: draft.seen };
    const act = this.act(accepts ? "accept" : "decide", { item_id: this.shown, changes, ...seen });
    this.remember(act, before, { next: this.ahead(1)[0] });
    this.setDraft(this.shown, undefined);
    const done = [isChanged ? "Saved" : "", accepts ? "accepted" : ""].filter(Boolean).join(" and ");
    this.leave(`${done[0].toUpperCase()}${done.slice(1)}: ${this.name(act.item_id)}.${left}${left && !isLast ? " k goes back." : ""}`);
  }

  /** Why the changes can't be saved, or why the grade can't be accepted; "" if nothing prevents it. */
  whyNot(isChanged, accepts) {
    const state = this.state();
    if (this.isConflict(this.shown)) return "Choose first which decision counts.";
    if (this.grade.querySelector('[aria-invalid="true"]')) return "These points can't be given: nothing is saved.";
    if (state.isBlank) return ON_ITS_WAY;
    if (accepts && whyNotAccepted(state)) return whyNotAccepted(state);
    const isGlance = performance.now() - this.enteredAt < GLANCE_MS && !(this.changedAt > this.enteredAt);
    return !isGlance ? "" : isChanged ? "This was changed before: once more saves it." : ONCE_MORE;
  }

  /** What is still unfinished on this submission if the draft is saved, in sentences. Shown before and after saving. */
  unfinished(isSaved, accepts = false) {
    const { changes } = this.drafts[this.shown];
    const state = this.state();
    const open = accepts ? [] : this.stillOpen();
    const mayAccept = !isSaved && state.criteria.every(({ points }) => points !== null);
    const names = open.join(", ");
    const before = `If you save now, ${names} ${open.length > 1 ? "have" : "has"} no decision and the grade stays blank${mayAccept ? "; press a to save this and accept the rest" : ""}.`;
    const blank = !open.length ? "" : isSaved ? ` Still to decide, and until then the grade is blank: ${names}.` : ` ${before}`;
    return blank + misfitWords(state, (id) => (isSaved && id === SUMMARY) || (changes[id] && (isSaved || id !== this.active))); // the rows say it before
  }

  /** What stays undecided if the changes are saved: the titles of criteria, and perhaps "the work as a whole". */
  stillOpen() {
    const { criteria, isWholeOpen, kind } = this.state();
    const acts = this.acts.filter((act) => act.item_id === this.shown && act.changes);
    const changed = Object.assign({}, ...acts.map(({ changes }) => changes), this.drafts[this.shown]?.changes);
    const isSettled = SUMMARY in changed || kind === "settled";
    const ids = isSettled ? [] : this.data.people[this.shown]?.criteria || [];
    const open = criteria.filter(({ id, points }) => (points === null && kind !== "waiting") || (ids.includes(id) && !(id in changed)));
    return [...open.map(({ title }) => title), ...(isWholeOpen && !isSettled ? ["the work as a whole"] : [])];
  }

  /** Record how to undo `act`. `next` is the submission that it led to. Acts with one `group` are undone together. */
  remember(act, before, { next = this.shown, group } = {}) {
    this.undoable.push({ id: idOf(act), item: act.item_id, before, next, group });
    sessionStorage.setItem(this.prefix + "undo", JSON.stringify(this.undoable.slice(-50)));
  }

  leave(status) {
    const [id] = this.ahead(1);
    if (id) return this.go(id, status);
    const rest = this.waiting().length ? "; g goes to the next that needs you" : this.stillOpen().length ? "; only this one still needs you" : ", and none needs you any more";
    this.status = `${status} There is none after this one${rest}.`;
    this.enteredAt = performance.now(); // so that a key that is pressed twice decides only once
    this.render();
    this.later();
  }

  undo() {
    this.endEntry();
    if (this.drafts[this.shown]) {
      this.setDraft(this.shown, undefined);
      this.status = "Discarded.";
      return this.render();
    }
    const last = this.undoable.at(-1);
    if (!last) return this.say("Nothing was saved on this page that could be undone.");
    if (last.group) return this.undoGroup(last.group);
    const name = this.name(last.item);
    if (![last.item, last.next].includes(this.shown) && this.asked !== last.id) {
      this.asked = last.id;
      return this.say(`You saved last for ${name}, not here: z once more undoes that, and goes there.`);
    }
    this.undoable.pop();
    sessionStorage.setItem(this.prefix + "undo", JSON.stringify(this.undoable));
    if (this.same?.item === last.item) this.same = null; // the comment that is offered for other submissions is undone
    this.act("undo", { item_id: last.item, undoes: last.id, before: last.before });
    this.go(last.item, `Undone: what you saved for ${name}, who is shown again.`);
  }

  /** One key changed a comment on several submissions, so one key undoes the change on all of them. */
  undoGroup(group) {
    const entries = this.undoable.filter((entry) => entry.group === group);
    this.undoable = this.undoable.filter((entry) => entry.group !== group);
    sessionStorage.setItem(this.prefix + "undo", JSON.stringify(this.undoable));
    for (const { id, item, before } of entries) this.act("undo", { item_id: item, undoes: id, before });
    this.status = `Undone: the comment on ${entries.length} more.`;
    this.render();
    this.later();
  }

  resolve(isMine) {
    const draft = this.drafts[this.shown];
    const base = this.cache.get(this.shown);
    if (!isMine) this.setDraft(this.shown, undefined);
    else {
      this.setDraft(this.shown, { ...draft, version: base.version, seen: base.decisions });
      return this.save(draft.accept);
    }
    this.render();
  }

  // --- giving points by keys

  current() {
    return this.state().criteria.find(({ id }) => id === this.active);
  }

  give(id, points) {
    const state = this.state();
    const criterion = state.criteria.find((each) => each.id === id);
    if (state.isBlank) this.say(ON_ITS_WAY);
    if (!criterion || state.isBlank) return false;
    if (!(points >= criterion.min && points <= criterion.max)) {
      this.say(`Points go from ${criterion.min} to ${criterion.max}.`);
      return false;
    }
    this.change(id, { points });
    return true;
  }

  typeDigit(digit, at) {
    const entry = this.entryAt(at);
    if (entry?.isHalf && digit === "5") return; // 2.5 is typed in full, but "." alone has given the half already
    if (entry?.isHalf) return this.say("Keys give halves: write other points into the field.");
    const criterion = this.current();
    if (!criterion) return this.sayNoPoints();
    const isNegative = entry ? entry.isNegative : criterion.max <= 0 || this.isNegative;
    const largest = isNegative ? -criterion.min : criterion.max;
    // If all possible points have one digit, a second digit replaces the first.
    const text = (largest < 10 ? "" : entry?.text || "") + digit;
    if (Number(text) > largest) return this.say(`Points go from ${criterion.min} to ${criterion.max}.`);
    if (!this.give(criterion.id, (isNegative ? -1 : 1) * Number(text) || 0)) return;
    this.beginEntry({ text, isNegative, at });
  }

  typeHalf(at) {
    const entry = this.entryAt(at);
    const criterion = this.current();
    if (!criterion) return this.sayNoPoints();
    if (entry?.isHalf) return;
    const number = Math.floor(Math.abs(criterion.points ?? 0)) + 0.5;
    const isNegative = entry ? entry.isNegative : criterion.points < 0 || criterion.max <= 0;
    if (this.give(criterion.id, isNegative ? -number : number)) this.beginEntry({ isHalf: true, at });
  }

  /**
   * The number that a key extends, or null. `at` is the time at which the key was pressed, because a busy page receives
   * keys late.
   */
  entryAt(at) {
    if (this.entry && at - this.entry.at > PAUSE_MS) this.endEntry();
    return this.entry;
  }

  /** Begin a number. Its points are given already. Further keys extend it until there is a pause. */
  beginEntry(entry) {
    this.endEntry();
    this.entry = entry;
    this.status = "";
    this.render();
  }

  typeMinus() {
    const criterion = this.current();
    if (!criterion) return this.sayNoPoints();
    this.endEntry();
    this.isNegative = criterion.min < 0;
    this.say(this.isNegative ? "−" : `Points go from ${criterion.min} to ${criterion.max}.`);
  }

  sayNoPoints() {
    this.say("Points belong to a criterion: ↑ and ↓ lead to one.");
  }

  endEntry() {
    this.entry = null;
    this.isNegative = false;
  }

  step(direction) {
    this.endEntry();
    const rows = this.rowsOf(this.state());
    const at = rows.indexOf(this.active) + direction;
    if (rows[at] !== undefined) this.open(rows[at]);
    else this.say(direction > 0 ? "This is the last row." : "This is the first row.");
  }

  open(id) {
    this.endEntry();
    this.active = id;
    this.isRoaming = this.isNewcomer = false;
    this.render();
  }

  // --- keys and clicks

  endPress() {
    setTimeout(() => {
      this.pressedAt = undefined;
      if (this.isStale) this.render();
    });
  }

  onClick(event) {
    // A person who comes back from another section gets the row that is open at first.
    if (event.target.closest?.("[data-testid=stSidebar] label")) this.active = null;
    if (!this.root?.isConnected) return;
    // After a click with the mouse, the clicked control loses the focus, so that the screen receives the keys. `detail`
    // is 0 if the keyboard caused the click. Then the control keeps the focus.
    const section = event.detail && event.target.closest?.("[data-testid=stSidebar] label, .kv button, .kv summary");
    if (section) setTimeout(() => document.activeElement?.matches("input[type=radio], .kv button, .kv summary") && document.activeElement.blur(), 50);
  }

  onKey(event) {
    if (!this.root?.isConnected || !this.data) return;
    this.isByPointer = this.isRoaming = this.isNewcomer = false;
    this.pressedAt = undefined;
    const { target } = event;
    const isHere = this.root.contains(target);
    if (!this.over.hidden) return this.onKeyInList(event);
    if (event.isComposing) return;
    if ((event.ctrlKey || event.metaKey) && event.key === "Enter" && isHere) target.blur?.();
    else if (event.ctrlKey || event.altKey || event.metaKey) return;
    else if (isText(target)) {
      const isField = target.tagName === "INPUT" || target.dataset.key === "comment";
      const isEnter = event.key === "Enter" && !event.shiftKey && isField;
      if (!isHere || !(isEnter || event.key === "Escape")) return;
      if (isEnter) event.preventDefault();
      if (isEnter && target.getAttribute("aria-invalid") === "true") return this.say("These points can't be given: Esc brings back what stands.");
      if (isEnter) this.wroteAt = event.timeStamp;
      return this.root.focus({ preventScroll: true });
    } else if (target.type === "checkbox" && event.key === " ") return;
    else if (target.closest?.("button, a, summary, [role=button]") && (event.key === "Enter" || event.key === " ")) return;
    else if (target.type === "radio" && event.key.startsWith("Arrow")) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (event.repeat && (key === "Enter" || key === "a")) event.preventDefault(); // a key held down decides only once
    else if (/^[0-9]$/.test(key)) this.typeDigit(key, event.timeStamp);
    else if (key === " " && event.shiftKey) this.scrollWork(-1);
    else if (this.keys(event.timeStamp)[key]) this.keys(event.timeStamp)[key]();
    else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }

  keys(at) {
    return {
      ".": () => this.typeHalf(at),
      ",": () => this.typeHalf(at),
      "-": () => this.typeMinus(),
      " ": () => this.scrollWork(1),
      ArrowUp: () => this.step(-1),
      ArrowDown: () => this.step(1),
      // A person who presses Enter twice in a comment perhaps wants a new paragraph. So the second Enter does not save.
      Enter: () => at - this.wroteAt < GLANCE_MS ? this.say("Enter once more saves. In the feedback, Shift Enter is a new line.") : this.save(),
      a: () => this.save(true),
      g: () => this.goToWaiting(),
      r: () => this.listReasons(),
      c: () => this.listComments(),
      e: () => this.write(),
      x: () => this.leaveOut(),
      y: () => this.changeSame(),
      n: () => this.leaveSame(),
      z: () => this.undo(),
      j: () => this.move(1),
      k: () => this.move(-1),
      s: () => this.listQueues(),
      "/": () => this.find(),
      Escape: () => this.root.contains(document.activeElement) && this.root.focus({ preventScroll: true }),
      "?": () => this.help(),
    };
  }

  write() {
    const area = this.grade.querySelector(".kv-active textarea");
    if (!area) return this.say("There is nothing to write here.");
    area.focus();
    area.select(); // so that typing replaces the text
  }

  leaveOut() {
    const state = this.state();
    const text = this.active === SUMMARY ? state.summary : this.current()?.feedback;
    if (!text) return this.say("There is no feedback to leave out here.");
    this.change(this.active, { feedback: "" });
    this.render();
  }

  scrollWork(direction) {
    const before = this.work.scrollTop;
    this.work.scrollTop += direction * 0.8 * this.work.clientHeight;
    if (this.work.scrollTop === before) this.say(direction > 0 ? "This is the end of the work." : "This is the beginning of the work.");
  }

  goToWaiting() {
    const [id] = this.waiting();
    if (id) this.go(id);
    else this.say("No other one needs you.");
  }

  listReasons() {
    this.endEntry();
    const id = this.active;
    if (!this.drafts[this.shown]?.changes[id]) return this.say("A reason belongs to a change: nothing is changed here.");
    const own = () => this.grade.querySelector("[data-key=reason]")?.select();
    this.list("Reason for the change", this.reasons(id), (reason) => this.change(id, { reason }), ["Another reason …", own]);
  }

  listComments() {
    this.endEntry();
    const id = this.active;
    const comments = this.data.phrases.comments[id] || [];
    if (!comments.length) return this.say("No comment was used here often: e writes one.");
    this.list("Comments used here, people's first", comments.map(([text]) => text), (feedback) => this.change(id, { feedback }));
  }

  listQueues() {
    this.list("Show", Object.keys(this.data.queues), (queue) => this.choose({}, queue));
  }

  // --- lists over the page

  overlay(title, ...content) {
    this.over.replaceChildren(make("div", {}, make("h3", { id: "kv-over-title" }, title), ...content,
      make("p", {}, make("button", { type: "button", onclick: () => this.close() }, make("span", {}, "Close"), " ", make("kbd", {}, "Esc")))));
    this.over.setAttribute("aria-labelledby", "kv-over-title");
    this.over.hidden = false;
    (this.over.querySelector("input") || this.over.querySelector("button")).focus({ preventScroll: true });
    this.over.scrollTop = 0; // a long list is read from its beginning
  }

  close() {
    this.over.hidden = true;
    this.over.replaceChildren();
    this.chosen = null;
    this.root.focus({ preventScroll: true });
  }

  list(title, texts, choose, own) {
    this.chosen = (at) => {
      const text = texts[at];
      if (text === undefined && !(own && at === texts.length)) return;
      this.close();
      if (text !== undefined) choose(text);
      this.render();
      if (text === undefined) own[1]();
    };
    const labels = own ? [...texts, own[0]] : texts;
    this.overlay(title, make("div", { class: "kv-list" }, ...labels.map((text, at) =>
      make("button", { type: "button", onclick: () => this.chosen(at) }, make("kbd", {}, String(at + 1)), " ", make("span", {}, text)))));
  }

  find() {
    this.endEntry();
    const found = make("div", { class: "kv-list" });
    const field = make("input", { "aria-label": "Find a submission", autocomplete: "off", oninput: () => fill() });
    const fill = () => {
      const sought = field.value.trim().toLowerCase();
      const all = this.data.queues.all.filter((id) => this.name(id).toLowerCase().includes(sought));
      const ids = all.slice(0, MOST_FOUND);
      this.chosen = (at) => {
        if (!ids[at]) return;
        this.close();
        this.go(ids[at]);
      };
      found.replaceChildren(...ids.map((id, at) => make("button", { type: "button", onclick: () => this.chosen(at) }, this.name(id))),
        make("p", { class: "kv-faint" }, all.length > ids.length ? `${all.length - ids.length} more: type a part of the name.` : ids.length ? "" : "There is none."));
    };
    fill();
    this.overlay("Find a submission", make("p", {}, field), found);
  }

  help() {
    const reviewers = Object.entries(this.data.reviewers).map(([name, count]) => `${name} ${count}`).join(", ");
    this.overlay("Keys", make("p", {}, RULE), make("dl", { class: "kv-keys" }, ...KEYS.map(([key, words]) => make("div", {}, make("dt", {}, key), make("dd", {}, words)))),
      reviewers ? make("p", { class: "kv-faint" }, `Submissions decided on: ${reviewers}.`) : "");
  }

  onKeyInList(event) {
    const isField = event.target.tagName === "INPUT";
    if (event.key === "Escape" || (event.key === "?" && !isField)) this.close();
    else if (event.key === "Enter" && isField) this.chosen?.(0);
    else if (/^[1-9]$/.test(event.key) && !isField && this.chosen) this.chosen(Number(event.key) - 1);
    else if (event.key === "Tab" || event.key.startsWith("Arrow")) {
      if (isField && /Left|Right/.test(event.key)) return event.stopImmediatePropagation();
      const places = [...this.over.querySelectorAll("input, button")];
      const isBack = event.shiftKey || event.key === "ArrowUp";
      const at = places.indexOf(document.activeElement) + (isBack ? -1 : 1);
      places[(at + places.length) % places.length].focus();
    } else {
      // The key is for the field or the button in the list. The page below must not handle it.
      return event.stopImmediatePropagation();
    }
    event.preventDefault();
    event.stopImmediatePropagation();
  }

  // --- drawing

  mount(root) {
    this.root = root;
    const find = (name) => root.querySelector(`.kv-${name}`);
    for (const name of ["who", "place", "alert", "work", "grade", "spoken", "over"]) this[name] = find(name);
    this.workKey = this.drawn = "";
    this.endQuestion();
    this.yourName = this.data.name;
    this.account = SHARED_ACCOUNTS.includes(this.data.account.toLowerCase()) ? "" : this.data.account;
    const actions = { save: "save", undo: "undo", find: "find", help: "help", needs: "goToWaiting" };
    for (const [name, method] of Object.entries(actions)) find(name).addEventListener("click", () => this[method]());
    find("view").addEventListener("click", ({ target }) =>
      target.setAttribute("aria-expanded", String(find("bar").classList.toggle("kv-all"))));
    find("previous").addEventListener("click", () => this.move(-1));
    find("next").addEventListener("click", () => this.move(1));
    this.over.addEventListener("click", (event) => event.target === this.over && this.close());
    this.fields = { show: find("show"), order: find("order"), share: find("share"), blind: find("blind"), name: find("name") };
    const option = (value, words) => make("option", { value }, words);
    this.fields.show.append(...Object.keys(this.data.queues).map((name) => option(name, name)));
    this.fields.order.append(option("", "student by student"), ...this.data.criteria.map(({ id, title }) => option(id, `only ${title}`)));
    this.fields.share.append(option("", "the whole class"));
    for (let total = 2; total <= SHARES; total++)
      for (let number = 1; number <= total; number++) this.fields.share.append(option(`${number}/${total}`, `part ${number} of ${total}`));
    const sections = new Set(Object.values(this.data.people).map(({ section }) => section).filter(Boolean));
    for (const section of [...sections].sort()) this.fields.share.append(option(`section ${section}`, `section ${section}`));
    this.fields.show.addEventListener("change", () => this.choose({}, this.fields.show.value));
    this.fields.order.addEventListener("change", () => this.choose({ order: this.fields.order.value }));
    this.fields.share.addEventListener("change", () => this.choose({ share: this.fields.share.value }));
    this.fields.blind.addEventListener("change", () => this.choose({ blind: this.fields.blind.checked }));
    this.fields.name.value = this.yourName || this.account; // the name that is recorded with each decision
    this.fields.name.placeholder = this.account;
    this.fields.name.addEventListener("input", () => this.takeName());
    // The account's name is only the default. A click selects it, so that typing replaces it.
    this.fields.name.addEventListener("click", ({ target }) => target.value === this.account && target.select());
    this.keepName();
    if (document.activeElement?.type === "radio") document.activeElement.blur();
    // Text is kept at each key press, but the rows are redrawn only when the focus leaves the field.
    this.grade.addEventListener("focusout", ({ target }) => {
      if (target.getAttribute("aria-invalid") === "true") this.drawn = ""; // then the field shows valid points again
      setTimeout(() => this.render());
    });
    this.fit();
    new ResizeObserver(() => this.keepInView()).observe(this.grade);
  }

  takeName() {
    this.yourName = this.fields.name.value.trim().replace(/\s+/g, " ");
    this.keepName();
    this.later();
  }

  /** Ask for the name that decisions carry, if nobody has given one and the account's is no person's. */
  asksName() {
    if (this.yourName || this.account) return false;
    this.root.querySelector(".kv-bar").classList.add("kv-all"); // on a narrow screen, the field is behind View
    this.fields.name.focus();
    this.say("Write your name first: it is written beside your decisions. Enter ends it. Nothing is lost.");
    return true;
  }

  keepName() {
    const cookie = encodeURIComponent(`${this.data.browser} ${this.yourName}`.trimEnd());
    document.cookie = `kvasir_desk=${cookie}; path=/; max-age=31536000; samesite=strict`;
  }

  choose(settings, queue = this.show) {
    this.hasMoved = true;
    this.show = queue;
    // From here on, the screen receives the keys.
    if (this.root.contains(document.activeElement)) this.root.focus({ preventScroll: true });
    Object.assign(this.settings, settings);
    this.store("settings", this.settings);
    this.endEntry();
    this.queue = [];
    const ids = this.data.queues[queue].filter((id) => this.belongs(id));
    this.active = null;
    if (ids.length && !ids.includes(this.shown)) this.enter(ids.find((id) => this.isFree(id)) || ids[0]);
    this.extendQueue();
    this.render();
    this.later();
  }

  /** Give the screen the height that is left on the page, so that the page itself never scrolls. */
  fit() {
    if (!this.root?.isConnected) return;
    const main = this.root.closest("[data-testid=stMain]");
    const top = this.root.getBoundingClientRect().top + (main ? main.scrollTop : scrollY);
    this.root.style.height = `${Math.max(352, innerHeight - top - 12)}px`;
  }

  render() {
    if (!this.root?.isConnected || !this.shown) return;
    this.isStale = performance.now() - this.pressedAt < LONGEST_PRESS_MS;
    if (this.isStale) return;
    const state = this.state();
    this.ensureActive(state);
    this.renderBar();
    this.renderAlert();
    this.renderWork();
    this.renderGrade(state);
    this.renderFoot();
    this.keepInView();
    this.fit();
  }

  renderBar() {
    const { queues } = this.data;
    this.who.textContent = this.who.title = this.name(this.shown);
    const share = this.settings.share ? `, ${queues["needs review"].filter((id) => this.isMine(id)).length} of them in my part` : "";
    const order = this.show === "needs review" ? ", most doubts first" : ", in the order of the files";
    const isQueued = new Set(queues[this.show]);
    const others = this.queue.filter((id) => !isQueued.has(id)).length; // already decided on, or opened by a link
    const what = this.show + (others ? `: ${this.queue.length - others}, others: ${others}` : "");
    const only = this.data.criteria.find(({ id }) => id === this.settings.order);
    const shown = [what, only && `only ${only.title}`].filter(Boolean).join(", ");
    this.place.replaceChildren(`${this.queue.indexOf(this.shown) + 1} of ${this.queue.length} shown (${shown}`,
      make("span", { class: "kv-wide" }, order), `) · in the class: ${this.data.standing}${share}`);
    this.fields.show.value = this.show;
    this.fields.order.value = this.settings.order;
    this.fields.share.value = this.settings.share;
    this.fields.blind.checked = this.settings.blind;
  }

  renderAlert() {
    const alerts = [];
    const count = this.acts.length;
    const kept = count ? ` ${count} of your decisions ${count === 1 ? "is" : "are"} kept in this browser, and sent as soon as it answers.` : "";
    if (this.isLost) alerts.push(make("div", {}, `The desk does not answer.${kept}`));
    if (this.failure) alerts.push(make("div", {}, `Not kept yet, and tried again: ${this.failure}`));
    for (const words of this.refusals.slice(-3)) {
      const dismiss = () => { this.refusals = this.refusals.filter((other) => other !== words); this.renderAlert(); };
      alerts.push(make("div", {}, words, " ", make("button", { type: "button", onclick: dismiss }, "Close")));
    }
    if (!this.isFree(this.shown)) alerts.push(make("div", {}, "Somebody else has this one open."));
    if (this.isConflict(this.shown)) alerts.push(this.conflict());
    if (this.same?.places) alerts.push(this.sameAlert());
    const others = Object.keys(this.drafts).filter((id) => id !== this.shown && this.data.people[id]);
    if (others.length)
      alerts.push(make("div", {}, "Not saved yet: ", ...others.slice(0, 5).map((id) =>
        make("button", { type: "button", onclick: () => this.go(id) }, this.name(id)))));
    const ticks = this.same?.ticked ? [...this.same.ticked] : [];
    const words = [...alerts.map((alert) => alert.textContent), ...ticks, this.shown].join("\n");
    if (words === this.alertWords && this.alert.childElementCount === alerts.length) return;
    this.alertWords = words;
    this.alert.replaceChildren(...alerts);
  }

  sameAlert() {
    const { from, to, item: changed, places, ticked } = this.same;
    const free = places.filter(([, , who]) => !who);
    const theirs = places.filter(([, , who]) => who).map(([item, , who]) => `${this.name(item)} (${who})`);
    const button = (words, key, action) =>
      make("button", { type: "button", onclick: action }, make("span", {}, words), " ", make("kbd", {}, key));
    const others = places.length === 1 ? "1 other submission has" : `${places.length} other submissions have`;
    const clip = (text) => (text.length > 60 ? `${text.slice(0, 57).trimEnd()} …` : text);
    const tick = (item, isTicked) => {
      ticked[isTicked ? "add" : "delete"](item);
      this.renderAlert();
      this.alert.querySelector(`[data-key="same ${item}"]`)?.focus();
    };
    const boxes = free.map(([item]) => make("label", { class: "kv-choice" },
      make("input", { type: "checkbox", "data-key": `same ${item}`, checked: ticked.has(item), onchange: ({ target }) => tick(item, target.checked) }), this.name(item)));
    const tickAll = () => {
      for (const [item] of free) ticked.add(item);
      this.renderAlert();
    };
    const all = boxes.length > 1 ? [make("button", { type: "button", onclick: tickAll }, "Tick all"), " "] : [];
    return make("div", {}, `For ${this.name(changed)} you changed “${clip(from)}” to “${clip(to)}”. ${others} the old comment${free.length ? ": " : ". "}`,
      ...(free.length ? [make("div", { class: "kv-line" }, ...boxes), ...all, button(`Change it on ${ticked.size} of ${places.length}`, "Y", () => this.changeSame()), " "] : []),
      button("Leave it there", "N", () => this.leaveSame()),
      theirs.length ? ` Decided by others, and not changed: ${theirs.slice(0, 9).join("; ")}${theirs.length > 9 ? "; …" : ""}.` : "");
  }

  conflict() {
    const draft = this.drafts[this.shown];
    const decisions = this.cache.get(this.shown).decisions;
    const line = ({ label, points, reason, by }) => make("div", {}, `${label}: ${points || "points unchanged"} — ${reason}${by ? `; by ${by}` : ""}`);
    const before = new Set(draft.seen.map((decision) => JSON.stringify(decision)));
    const labels = new Set(decisions.map(({ label }) => label));
    const undone = draft.seen.filter(({ label }) => !labels.has(label));
    const mine = Object.entries(draft.changes).map(([id, change]) => line({ label: id || "whole", points: change.points === undefined ? "" : show(change.points), reason: this.reason(id), by: "" }));
    if (draft.accept) mine.push(make("div", {}, mine.length ? "the rest accepted" : "accepted as it is"));
    return make("div", {},
      make("p", {}, "Somebody has decided on this submission since you began. Nothing of yours is saved yet."),
      make("strong", {}, "Theirs"),
      ...undone.map(({ label }) => make("div", {}, `${label}: the decision was undone`)),
      ...decisions.filter((decision) => !before.has(JSON.stringify(decision))).map(line),
      make("strong", {}, "Yours"), ...mine,
      make("p", { class: "kv-line" },
        make("button", { type: "button", class: "kv-main", onclick: () => this.resolve(true) }, "Mine replaces it"),
        make("button", { type: "button", onclick: () => this.resolve(false) }, "Keep theirs")));
  }

  renderWork() {
    const content = this.cache.get(this.shown);
    const key = content?.work ? `${this.shown} ${content.workVersion}` : "";
    if (key !== this.workKey || !key) {
      const place = key && this.workKey.startsWith(`${this.shown} `) ? this.placeInWork() : null;
      this.workKey = key;
      this.work.replaceChildren(
        ...(content?.problem ? [make("p", { class: "kv-problem" }, content.state.includes(content.problem) ? "This can't be read; the grade says why." : content.problem)] : []),
        ...(content?.work ? content.work.map(block) : [make("p", { class: "kv-faint" }, "…")]), content?.cut ? this.showAll(content) : "");
      if (content?.cut) for (const end of this.work.querySelectorAll(".work-cut")) end.append(" ", this.showAll(content));
      this.work.scrollTop = 0;
      if (place) this.returnTo(place);
      if (place && !this.seeksQuote) this.markQuote();
      else this.jumpedTo = "";
      this.seeksQuote = false;
    }
    const place = `${key && this.shown} ${this.active}`;
    if (place !== this.jumpedTo) {
      this.jumpedTo = place;
      this.jump();
    }
  }

  /** A button that loads the whole work. With `seeksQuote`, it also scrolls to the quote. */
  showAll({ chars }, seeksQuote = false) {
    const ask = () => {
      this.whole = this.shown;
      this.seeksQuote = seeksQuote;
      this.later();
    };
    return make("button", { type: "button", onclick: ask }, `Show all ${chars.toLocaleString("en")} characters`);
  }

  /** The parts of the work, without the elements that are there only while a part of it is left out. */
  partsOfWork() {
    return [...this.work.children].filter((part) => !part.matches(".work-cut, button"));
  }

  /** The number of the part at the top of the panel, and the offset of its top from the panel's top. */
  placeInWork() {
    const { top } = this.work.getBoundingClientRect();
    const number = this.partsOfWork().findIndex((part) => part.getBoundingClientRect().bottom > top + 1);
    return { number, offset: this.partsOfWork()[number]?.getBoundingClientRect().top - top };
  }

  returnTo({ number, offset }) {
    const part = this.partsOfWork()[number];
    if (part) this.work.scrollTop += part.getBoundingClientRect().top - this.work.getBoundingClientRect().top - offset;
  }

  /** If the quote is in the part of a long work that is left out: a line that says so, with a button that loads it. */
  quoteIsBeyond({ id, found }) {
    const content = this.cache.get(this.shown);
    const isMarked = content?.work?.some(({ marks }) => Object.values(marks || {}).some((ids) => ids.split(", ").includes(id)));
    if (!content?.cut || found !== "found" || isMarked) return [];
    return [make("p", { class: "kv-faint" }, "This is further on in the work than what is shown. ", this.showAll(content, true))];
  }

  /** Highlight the quote of the active criterion. Returns its first element. */
  markQuote() {
    let first;
    for (const mark of this.work.querySelectorAll("[data-criteria]")) {
      const isNow = mark.dataset.criteria.split(", ").includes(this.active);
      mark.classList.toggle("kv-now", isNow);
      if (isNow) first ??= mark;
    }
    return first;
  }

  /** Highlight the quote, and scroll to it if it is out of sight. */
  jump() {
    const first = this.markQuote();
    if (!first) return;
    const offset = first.getBoundingClientRect().top - this.work.getBoundingClientRect().top;
    if (offset < 0 || offset > this.work.clientHeight - 40) this.work.scrollTop += offset - this.work.clientHeight / 3;
  }

  renderGrade(state) {
    // Redraw only if something has changed, because a redraw removes the selection of text.
    const { criteria, phrases, people } = this.data;
    const drawn = JSON.stringify([this.shown, this.active, { ...state, work: 0 }, this.drafts[this.shown], this.texts,
      criteria, phrases.comments, people[this.shown]]);
    if (drawn === this.drawn && this.grade.childElementCount) return;
    this.drawn = drawn;
    const criterion = state.criteria.find(({ id }) => id === this.active);
    this.spoken.textContent = criterion ? `${criterion.title}: ${show(criterion.points)} of ${criterion.max}. ${criterion.doubts.join("; ")}` : "";
    const focused = this.grade.contains(document.activeElement) ? document.activeElement : null;
    const { scrollTop } = this.grade;
    const focus = focused && { key: keyOf(focused), at: [focused.selectionStart, focused.selectionEnd] };
    this.grade.replaceChildren(this.head(state), ...this.rowsOf(state).map((id) => this.row(state, id)));
    this.grade.scrollTop = scrollTop;
    const places = [...this.grade.querySelectorAll("button, input, select, textarea, summary, [tabindex]")];
    const again = focus?.key && places.find((place) => keyOf(place) === focus.key);
    if (again) {
      again.focus({ preventScroll: true });
      if (isText(again) && again.tagName !== "SELECT") again.setSelectionRange(...focus.at);
    }
  }

  head(state) {
    const isMoved = this.drafts[this.shown] || this.acts.some((act) => act.item_id === this.shown);
    const total = isMoved && state.whole === null ? show(sumOf(state.criteria)) : state.points || "–";
    const isOpen = isMoved && total !== "–" && this.stillOpen().length > 0;
    // All is decided on this page, but the desk's data does not have it yet.
    const isDone = isMoved && total !== "–" && !isOpen;
    const isUnsaved = isDone && !!this.drafts[this.shown];
    const misfits = state.kind === "settled" ? misfitWords(state) : "";
    const standing = isUnsaved ? "Not saved yet." : isDone && state.kind === "open" ? "Not confirmed yet." : misfits ? `The grade is final.${misfits}` : state.state;
    return make("div", {},
      make("div", { class: "kv-head" },
        make("strong", {}, isOpen ? `Final points – / ${state.max}; ${total} once all is decided` : `Final points ${total} / ${state.max}`),
        make("span", {}, `By the model ${state.model || "–"}`),
        make("span", { class: `state state-${isUnsaved || misfits ? "open" : state.kind}` }, ...brief(standing))),
      ...(state.penalty ? [make("p", { class: "kv-faint" }, state.penalty)] : []),
      ...(state.reason && !standing.includes(state.reason) ? [make("p", { class: "kv-problem" }, state.reason)] : []),
      ...state.remarks.map((remark) => make("p", { class: "kv-faint" }, ...brief(`remark: ${remark}`))));
  }

  row(state, id) {
    const isActive = id === this.active;
    const criterion = state.criteria.find((each) => each.id === id);
    const open = state.requests.filter(({ reply }) => reply === null).length;
    const titles = { [SUMMARY]: "Summary", [REQUESTS]: `${open ? "⚑ " : ""}Asked for another look`, [MORE]: "Decisions, requests, prompts" };
    const change = this.drafts[this.shown]?.changes[id];
    const isDoubtful = this.data.people[this.shown]?.criteria.includes(id) && !change;
    const head = make("button", { type: "button", "aria-expanded": String(isActive), "data-key": `row ${id}`, onclick: () => this.open(id) },
      make("span", { class: "kv-title" }, criterion ? criterion.title : titles[id]),
      (id === SUMMARY ? isForOtherPoints(state) : criterion && !isActive && isMisfit(criterion)) ? make("span", { class: "kv-flag", title: "written for other points" }, "⚑", make("span", { class: "kv-wide" }, " for other points")) : "",
      isDoubtful ? make("span", { class: "kv-flag", title: criterion.doubts.join("; ") }, "⚑ open") : "",
      change ? make("span", { class: "kv-changed" }, "not saved") : "",
      criterion ? make("span", { class: "kv-points" }, `${show(criterion.points)} / ${criterion.max}`) : "");
    const body = !isActive ? [] : [make("div", { class: "kv-body" }, ...(criterion ? this.criterionBody(criterion)
      : id === SUMMARY ? this.summaryBody(state) : id === REQUESTS ? state.requests.map((request) => this.request(request)) : this.moreBody(state)))];
    return make("div", { class: `kv-row${isActive ? " kv-active" : ""}`, "data-row": id }, head, ...body);
  }

  criterionBody(criterion) {
    const { id, min, max } = criterion;
    const { guidance, step } = this.data.criteria.find((each) => each.id === id) || { guidance: "", step: 1 };
    const isOpen = this.data.people[this.shown]?.criteria.includes(id);
    const misquoted = criterion.evidence && MISQUOTED[criterion.found];
    const model = `model: ${criterion.model === null ? "no points" : criterion.model} of ${max}`;
    const give = (points) => {
      this.endEntry();
      this.isRoaming = false;
      this.give(id, points);
      this.render();
    };
    const values = [];
    for (let points = min; points <= max && values.length < 12; points += step) values.push(Number(points.toFixed(6)));
    const chips = values.length < 12 ? values.map((points) =>
      make("button", { type: "button", "aria-pressed": String(points === criterion.points), "aria-label": `${points} points for ${id}`, onclick: () => give(points) }, String(points))) : [];
    const bump = (by) => chips.length ? "" : make("button", { type: "button", "aria-label": `${by < 0 ? "Fewer" : "More"} points for ${id}`,
      onclick: () => { this.give(id, Math.min(max, Math.max(min, (this.current()?.points ?? 0) + by))); this.render(); } }, by < 0 ? "−" : "+");
    const field = make("input", { "aria-label": `Points for ${id}`, inputmode: "decimal", autocomplete: "off", "data-key": "points",
      oninput: ({ target }) => this.typePoints(id, target) });
    field.value = criterion.points ?? "";
    return [
      ...criterion.doubts.map((doubt) => make("p", { class: isOpen ? "kv-flag" : "kv-faint" }, ...brief(isOpen ? `⚑ ${doubt}` : `settled: ${doubt}`))),
      ...(guidance ? [make("pre", { class: "kv-text", "aria-label": "Guidance", tabindex: "0" }, guidance)] : []),
      make("p", { class: "kv-faint" }, criterion.model === null ? (criterion.reason !== this.state().reason && criterion.reason) || model : `${model}; evidence ${criterion.found}`,
        criterion.likelihoods ? ` · ${criterion.likelihoods}` : ""),
      ...(misquoted ? [make("span", { class: "kv-label" }, misquoted), make("pre", { class: "kv-text kv-misquote", tabindex: "0" }, criterion.evidence)]
        : criterion.evidence ? [make("pre", { class: "kv-text kv-quote", title: "Show it in the work", tabindex: "0", onclick: () => this.jump() }, criterion.evidence), ...this.quoteIsBeyond(criterion)] : []),
      make("div", { class: "kv-give" }, ...chips, bump(-step), field, bump(step)),
      ...this.commentFields(id, `Feedback on ${id}`, criterion.feedback, isMisfit(criterion) ? [this.misfit(criterion)] : []),
    ];
  }

  summaryBody(state) {
    const note = make("div", { class: "kv-misfit" },
      make("span", {}, `This summary was written for ${state.model} of ${state.max}. Edit it, or leave it out.`),
      make("button", { type: "button", onclick: () => this.leaveOut() }, make("span", {}, "Leave it out"), " ", make("kbd", {}, "X")));
    return this.commentFields(SUMMARY, "Summary", state.summary, isForOtherPoints(state) ? [note] : []);
  }

  misfit({ id, points, model, max }) {
    const isGiven = this.drafts[this.shown]?.changes[id]?.points !== undefined;
    const put = (feedback) => { this.change(id, { feedback }); this.render(); };
    return make("div", { class: "kv-misfit" },
      make("span", {}, `This feedback was written for ${model} of ${max}; ${isGiven ? "you gave" : "it is now"} ${points}. Edit it, or leave it out.`),
      make("button", { type: "button", onclick: () => put("") }, make("span", {}, "Leave it out"), " ", make("kbd", {}, "X")),
      ...(isGiven ? [make("button", { type: "button", onclick: () => put(this.reason(id)) }, make("span", {}, "Use the reason as feedback"))] : []));
  }

  commentFields(id, label, text, notes = []) {
    const area = make("textarea", { "aria-label": label, rows: "2", "data-key": "comment", placeholder: "Nothing is said here.", oninput: ({ target }) => { this.change(id, { feedback: target.value }); this.renderFoot(); } });
    area.value = text;
    const used = (this.data.phrases.comments[id] || []).length;
    const fields = [make("span", { class: "kv-label" }, `${label}, for the student`, make("span", { class: "kv-hint" }, "Enter ends it."), used ? make("button", { type: "button", class: "kv-used", onclick: () => this.listComments() }, make("span", {}, "Used before"), " ", make("kbd", {}, "C")) : ""), ...notes, area];
    if (!this.drafts[this.shown]?.changes[id]) return fields;
    const reason = make("input", { "aria-label": "Reason for the change", autocomplete: "off", "data-key": "reason", oninput: ({ target }) => this.change(id, { reason: target.value.trim() || undefined }) });
    reason.value = this.reason(id);
    return [...fields, make("span", { class: "kv-label" }, "Reason, for the course team", make("span", { class: "kv-hint" }, "Taken as it stands unless you choose another. Enter ends it.")),
      make("div", { class: "kv-line" }, reason, make("button", { type: "button", onclick: () => this.listReasons() }, make("span", {}, "Reasons"), " ", make("kbd", {}, "R")))];
  }

  typePoints(id, field) {
    const text = field.value.trim().replace(",", ".");
    const points = Number(text);
    const { min, max } = this.state().criteria.find((criterion) => criterion.id === id);
    const isGood = text !== "" && points >= min && points <= max;
    field.setAttribute("aria-invalid", String(!isGood));
    if (isGood) this.change(id, { points });
    this.say(isGood ? "" : `Points go from ${min} to ${max}.`);
  }

  request({ id, about, points, text, reply, by }) {
    const key = `reply ${id}`;
    const written = this.texts[key];
    const parts = [
      make("p", {}, `Asked for another look${about ? ` about ${about}` : ""}; points then: ${points || "none"}`),
      make("pre", { class: "kv-text", tabindex: "0" }, text),
    ];
    if (reply !== null) parts.push(make("p", { class: "kv-faint" }, `Replied${by ? ` (${by})` : ""}:`), make("pre", { class: "kv-text", tabindex: "0" }, reply));
    if (reply === null || written) {
      const seen = written && "seen" in written ? written.seen : reply;
      const area = make("textarea", { "aria-label": "Reply, which the student gets", rows: "2", "data-key": key,
        oninput: ({ target }) => this.setText(key, target.value ? { text: target.value, seen } : undefined) });
      area.value = written?.text || "";
      const send = () => {
        if (this.asksName()) return;
        this.act("reply", { item_id: this.shown, request_id: id, text: this.texts[key]?.text || "", seen_reply: seen });
        this.later();
      };
      parts.push(make("span", { class: "kv-label" }, "Reply, which the student gets"), area, make("button", { type: "button", onclick: send }, "Reply"));
    }
    return make("div", {}, ...parts);
  }

  moreBody(state) {
    const key = `ask ${this.shown}`;
    const written = this.texts[key] || { about: "", text: "" };
    const about = make("select", { "aria-label": "About", "data-key": "about", onchange: ({ target }) => this.setText(key, { ...this.texts[key], about: target.value }) },
      make("option", { value: "" }, "the whole grade"), ...state.criteria.map(({ id, title }) => make("option", { value: id }, title)));
    about.value = written.about || "";
    const words = make("textarea", { "aria-label": "The student's words", rows: "2", "data-key": "asked", oninput: ({ target }) => this.setText(key, { ...this.texts[key], text: target.value }) });
    words.value = written.text || "";
    const enter = () => {
      if (this.asksName()) return;
      const asked = this.texts[key] || {};
      this.act("ask", { item_id: this.shown, criterion_id: asked.about || null, text: asked.text || "" });
      this.later();
    };
    const texts = this.cache.get(this.shown)?.prompts;
    return [
      ...state.decisions.flatMap(({ label, points, reason, by, feedback }) => [
        make("p", { class: "kv-faint" }, `${label}: ${points || "points unchanged"} — ${reason}${by ? `; by ${by}` : ""}`),
        ...(feedback ? [make("pre", { class: "kv-text", tabindex: "0" }, feedback)] : [])]),
      make("span", { class: "kv-label" }, "Enter a request of this student"), about, words,
      make("p", { class: "kv-line" }, make("button", { type: "button", onclick: enter }, "Enter it")),
      make("button", { type: "button", onclick: () => { this.prompts = this.shown; this.later(); } }, "Show the exact prompts and answers"),
      ...(texts || []).flatMap(([title, text]) => [make("p", { class: "kv-faint" }, title), make("pre", { class: "kv-text", tabindex: "0" }, text)]),
    ];
  }

  renderFoot() {
    const isUnsaved = !!this.drafts[this.shown];
    const state = this.state();
    const words = this.status || (isUnsaved ? `Not saved yet.${this.unfinished(false)}` : "");
    const line = this.acts.length ? `${words} ${this.acts.length} not confirmed yet.` : words;
    const button = (name) => this.root.querySelector(`.kv-${name}`);
    if (button("status").textContent !== line) button("status").textContent = line;
    button("save").firstChild.textContent = isUnsaved ? "Save and next" : this.status === ONCE_MORE ? "Accept as it is" : "Accept and next";
    button("save").disabled = !isUnsaved && !!state.isBlank;
    button("save").title = isUnsaved ? "" : whyNotAccepted(state); // a click or the key gives this reason too
    button("save").setAttribute("aria-disabled", String(button("save").title !== ""));
    button("undo").disabled = !isUnsaved && !this.undoable.length;
    button("next").disabled = !this.ahead(1).length;
    button("previous").disabled = !this.ahead(-1).length;
    button("needs").disabled = !this.waiting().length;
  }

  keepInView() {
    const row = this.grade.querySelector(".kv-active");
    if (!row || this.isRoaming) return;
    if (this.grade.scrollHeight > this.grade.clientHeight + 1 && getComputedStyle(this.grade).overflowY !== "visible") {
      if (this.isNewcomer) this.grade.scrollTop = 0; // shows the total, and why a person must decide, if there is room
      const [outer, inner] = [this.grade.getBoundingClientRect(), row.getBoundingClientRect()];
      const isTall = inner.height > outer.height;
      const points = isTall ? row.querySelector(".kv-give") : null; // then it is enough that the points are in view
      const end = (points || row).getBoundingClientRect().bottom;
      if (inner.top < outer.top || (end > outer.bottom && isTall)) this.grade.scrollTop += inner.top - outer.top - 6;
      else if (end > outer.bottom) this.grade.scrollTop += inner.bottom - outer.bottom + 6;
    } else if (this.isByPointer === false) row.scrollIntoView({ block: "nearest" }); // keys scroll the page itself
  }
}

/** A short text; of a long text the beginning, and a click shows the rest. */
function brief(text) {
  if (text.length <= LONGEST_LINE) return [text];
  const end = text.lastIndexOf(" ", LONGEST_LINE - 40);
  const at = end > 0 ? end : LONGEST_LINE - 40;
  const summary = make("summary", { "data-key": `more ${text}` }, `${text.slice(0, at)} … `, make("u", {}, "more"));
  return [make("details", {}, summary, text.slice(at))];
}

/** What identifies an element when the page is redrawn. */
const keyOf = (element) => element.dataset.key || element.getAttribute("aria-label") || element.textContent;

/** Whether the student would get the model's feedback with points that it was not written for. */
const isMisfit = ({ points, model, feedback, written }) =>
  points !== null && model !== null && points !== model && !!written.trim() && feedback.trim() === written.trim();

/** The sum of the criteria's points, at least 0; null if some have none. */
const sumOf = (criteria) => {
  const points = criteria.map((criterion) => criterion.points);
  return points.includes(null) ? null : Math.max(0, Number(points.reduce((total, each) => total + each, 0).toFixed(6)));
};

/** `isMisfit` for the summary. It was written for the model's total. A deduction for lateness doesn't count. */
const isForOtherPoints = ({ criteria, whole, model, summary, written }) => {
  const total = whole ?? sumOf(criteria);
  return total !== null && !!model && show(total) !== model && !!written.trim() && summary.trim() === written.trim();
};

/** Which feedback the student would get with other points, among the rows that `counts` accepts, as a sentence. */
const misfitWords = (state, counts = () => true) => {
  const titles = titlesOf(state.criteria.filter((each) => isMisfit(each) && counts(each.id)));
  const isSummary = isForOtherPoints(state) && counts(SUMMARY);
  const texts = [...(titles ? [`feedback on ${titles}`] : []), ...(isSummary ? ["the summary"] : [])];
  return texts.length ? ` For other points: ${texts.join("; ")}.` : "";
};

/** Why a grade can't be accepted as it stands; "" if it can. */
const whyNotAccepted = ({ criteria, kind, whole }) => {
  const missing = titlesOf(criteria.filter(({ points }) => points === null));
  if (kind === "waiting") return "This one is not graded yet: j goes to the next.";
  return missing && whole === null
    ? `There are no points to accept for ${missing}: give points, or see on Grade what can be tried again. j goes on.` : "";
};

const idOf = (act) => `${act.sender} ${act.number}`;
const titlesOf = (criteria) => criteria.map(({ title }) => title).join(", ");

/** Apply an act to the state of a submission, as far as its effect is known without the desk. */
function applyAct(state, act) {
  if (act.changes) applyChanges(state, act.changes);
  if (act.kind === "undo" && act.before) {
    state.summary = act.before.summary;
    for (const criterion of state.criteria) {
      if (!(criterion.id in act.before.points)) continue;
      criterion.points = act.before.points[criterion.id];
      criterion.feedback = act.before.feedback[criterion.id];
    }
  }
  if (act.kind === "accept") Object.assign(state, { kind: "settled", state: "Accepted." });
}

function applyChanges(state, changes) {
  for (const [id, { points, feedback }] of Object.entries(changes)) {
    const criterion = state.criteria.find((each) => each.id === id);
    if (id === SUMMARY && feedback !== undefined) state.summary = feedback;
    if (!criterion) continue;
    if (points !== undefined) criterion.points = points;
    if (feedback !== undefined) criterion.feedback = feedback;
  }
}

export default function ({ data, setStateValue, parentElement }) {
  window.kvasirReview ??= new Screen();
  window.kvasirReview.receive(data, setStateValue, parentElement);
}
