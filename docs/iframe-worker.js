// The search of the site runs in a Worker, and browsers start none from the file system. For pages
// opened from disk, this class runs the worker's script in a hidden frame instead. The theme's
// offline plugin would load one from the network; it leaves a file of this name alone.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.inside = new Promise((resolve, reject) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.addEventListener("load", () => this.start(frame.contentWindow, url, resolve, reject), {
          once: true,
        });
        document.body.append(frame);
      });
    }

    start(inside, url, resolve, reject) {
      // What the worker posts goes to the page; a window's own postMessage would go to itself.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.onload = () => resolve(inside);
      script.onerror = () => reject(new Error(`${url} did not load`));
      script.src = url;
      inside.document.head.append(script);
    }

    async postMessage(data) {
      const inside = await this.inside;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
  }
  window.IFrameWorker = IFrameWorker; // the worker's script asks for this name
  window.Worker = IFrameWorker;
}
