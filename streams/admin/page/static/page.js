// What a page of the server cannot do itself: ages that grow, times that are left, and the news that it is gone.
"use strict";
(() => {
  const AGE_EVERY_MS = 1000;
  const units = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];

  function shown(seconds) {
    let left = Math.max(0, Math.floor(seconds));
    const found = [];
    for (const [size, unit] of units) {
      const count = Math.floor(left / size);
      left %= size;
      if (count > 0 || (unit === "s" && found.length === 0)) found.push(`${count}${unit}`);
    }
    return found.slice(0, 2).join(" ");
  }

  // The server's clock may differ from this one: the page has its time.
  const clock = document.getElementById("clock");
  const ahead = clock === null ? 0 : Number(clock.dataset.now) - Date.now() / 1000;

  function grow() {
    if (document.body.classList.contains("is-lost")) return;
    const now = Date.now() / 1000 + ahead;
    for (const time of document.querySelectorAll("time")) {
      const { since, until } = time.dataset;
      const text = shown(since === undefined ? Number(until) - now : now - Number(since));
      if (time.textContent !== text) time.textContent = text;
    }
  }

  function tell(isHere) {
    const told = document.getElementById("connection");
    if (told === null || told.dataset.state === (isHere ? "live" : "lost")) return;
    told.dataset.state = isHere ? "live" : "lost";
    const time = `${new Date().toISOString().slice(11, 19)} UTC`; // as all times of the page
    told.textContent = isHere ? "Live" : `Server lost at ${time}; trying again`;
    document.body.classList.toggle("is-lost", !isHere);
  }

  // A page that is left has no news: without this the browser reports a broken connection.
  htmx.createEventSource = (url) => {
    const source = new EventSource(url);
    window.addEventListener("beforeunload", () => source.close());
    return source;
  };

  document.addEventListener("htmx:sseOpen", () => tell(true));
  document.addEventListener("htmx:sseError", () => tell(false));
  document.addEventListener("htmx:sseMessage", grow);
  document.addEventListener("submit", (event) => {
    const question = event.target.dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });
  grow();
  window.setInterval(grow, AGE_EVERY_MS);
})();
