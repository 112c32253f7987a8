// Opens pages of reports in Chromium, at the widths of a laptop and of phones, light and dark: nothing may reach past
// the window or past its panel. Prints a line for each and ends with 1 if something does; the pictures are beside it.
//
//   npm install puppeteer-core @sparticuz/chromium
//   node benchmarks/page_widths.mjs report.html bench.html
import chromium from '@sparticuz/chromium';
import puppeteer from 'puppeteer-core';
import path from 'node:path';

const browser = await puppeteer.launch({ args: chromium.args, executablePath: await chromium.executablePath(), headless: 'shell' });
const tab = await browser.newPage();

function measure() {
  const root = document.documentElement;
  const past = [...document.querySelectorAll('body *')].filter((element) => {
    const own = element.getBoundingClientRect();
    const panel = element.parentElement.closest('.panel');
    return own.right > (panel ?? root).getBoundingClientRect().right + 0.5;
  });
  const scrolls = [...document.querySelectorAll('.panel, .wide, .tiles')].filter((each) => each.scrollWidth > each.clientWidth + 1);
  return { wide: root.scrollWidth > root.clientWidth, past: past.map((each) => each.textContent.slice(0, 40)), scrolls: scrolls.length };
}

for (const file of process.argv.slice(2)) {
  for (const width of [1280, 768, 390, 320]) {
    for (const scheme of ['light', 'dark']) {
      await tab.setViewport({ width, height: 900 });
      await tab.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: scheme }]);
      await tab.goto(`file://${path.resolve(file)}`);
      const found = await tab.evaluate(measure);
      const fits = !found.wide && !found.past.length && !found.scrolls;
      if (!fits) process.exitCode = 1;
      console.log(file, width, scheme, fits ? 'fits' : JSON.stringify(found));
      await tab.screenshot({ path: `${file}.${width}.${scheme}.png`, fullPage: true });
    }
  }
}
await browser.close();
