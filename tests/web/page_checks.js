/* What a browser is asked about the page as it stands; each function lists what is wrong. */
({
  reachable: () => [...document.querySelectorAll("button, input:not([type=file]), select, a[href]:not(.skip), canvas[tabindex], .drop")].filter((one) => one.checkVisibility()),

  /* What a screen reader has no name for. */
  nameless() {
    const name = (one) => one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length || one.querySelector("img[alt]")?.alt;
    return this.reachable().filter((one) => !name(one)).map((one) => one.outerHTML);
  },

  /* Too small for a finger; a label belongs to its field. */
  small() {
    const boxes = this.reachable().map((one) => [one, (one.closest("label") ?? one).getBoundingClientRect()]);
    return boxes.filter(([, box]) => box.width && Math.min(box.width, box.height) < 43.5).map(([one, box]) => `${one.outerHTML.slice(0, 120)} ${box.width} x ${box.height}`);
  },

  /* Wider than the screen, on the page or in a dialog; a phone makes innerWidth as wide as the page. */
  wide() {
    const all = [document.documentElement, ...document.querySelectorAll("dialog[open], dialog[open] *")];
    return all.filter((one) => one.scrollWidth > screen.width).map((one) => one.outerHTML.slice(0, 120));
  },

  /* Texts and placeholders of less contrast than 4.5 with the nearest background that is not transparent (WCAG 2, AA). */
  contrast() {
    const parse = (colour) => {
      const n = colour.match(/[\d.]+/g).map(Number);
      return colour.startsWith("color(srgb") ? [...n.slice(0, 3).map((v) => v * 255), n[3] ?? 1] : [...n.slice(0, 3), n[3] ?? 1];
    };
    const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const behind = (element) => {
      for (let at = element; at; at = at.parentElement) { const colour = parse(getComputedStyle(at).backgroundColor); if (colour[3] === 1) return colour; }
      return [255, 255, 255];
    };
    const texts = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walk.nextNode(); node; node = walk.nextNode()) {
      const element = node.parentElement;
      if (node.data.trim() && element.checkVisibility() && !element.closest("script, noscript, option, :disabled")) texts.push([element, getComputedStyle(element).color, node.data]);
    }
    for (const field of document.querySelectorAll("input[placeholder]")) if (field.checkVisibility()) texts.push([field, getComputedStyle(field, "::placeholder").color, field.placeholder]);
    if (texts.length < 10) return ["hardly any text"];
    const ratio = ([element, colour]) => {
      const [dark, light] = [luminance(parse(colour)), luminance(behind(element))].sort((a, b) => a - b);
      return (light + 0.05) / (dark + 0.05);
    };
    return texts.filter((one) => ratio(one) < 4.5).map((one) => `${one[2].trim().slice(0, 40)}: ${ratio(one).toFixed(2)}`);
  },
})
