// The texts that are seen and whose contrast with what is behind them is below 4.5 (WCAG AA), with that contrast.
(() => {
  const parse = (text) => text.match(/[\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const chain = [];
    for (let at = element; at; at = at.parentElement) chain.unshift(parse(getComputedStyle(at).backgroundColor));
    return chain.reduce((below, colour) => over(colour, below), [255, 255, 255]);
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, option")) continue;
    const ground = behind(element);
    const [a, b] = [light(over(parse(getComputedStyle(element).color), ground)), light(ground)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) poor.push(`${walker.currentNode.data.trim().slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return [...new Set(poor)];
})();
