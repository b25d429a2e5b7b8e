// The search where the site is opened as files: browsers start no Worker from file://, so that a hidden frame is one.
// Pages that a server sends have Workers, and this changes nothing there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => this.run(one)), Promise.resolve())
      this.started = this.run(url)
    }
    run(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        this.inside.document.body.appendChild(script)
      })
    }
    postMessage(data) {
      this.started.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
