/* Lets the search run where a page is opened from a file: browsers start no worker there, a script in a hidden frame will do. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {  // the search asks for this name
    constructor(url) {
      super();
      const base = new URL(url, document.baseURI).href;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.inside = inside;
      this.ready = false;
      const answer = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inside.postMessage = (data) => setTimeout(() => answer(data));
      inside.importScripts = (...names) =>
        names.reduce(
          (before, name) =>
            before.then(
              () =>
                new Promise((done, failed) => {
                  const script = inside.document.createElement("script");
                  script.src = new URL(name, base).href;
                  script.onload = done;
                  script.onerror = failed;
                  inside.document.body.appendChild(script);
                }),
            ),
          Promise.resolve(),
        );
      inside.importScripts(base).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.deliver(data));
      });
    }
    deliver(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }
    postMessage(data) {
      if (this.ready) setTimeout(() => this.deliver(data));
      else this.waiting.push(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
