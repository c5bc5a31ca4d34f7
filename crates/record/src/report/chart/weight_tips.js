for (const area of document.currentScript.closest('svg').querySelectorAll('[data-weights]')) {
  const { name, kind, full, weights } = area.dataset;
  const [rows, columns, high, wide, queries, keys] = area.dataset.grid.split(' ').map(Number);
  const tokens = JSON.parse(area.dataset.tokens || '[]');
  const digits = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/';
  const several = { query: 'queries', key: 'keys', slot: 'slots' };
  const within = (at, from, length, count) => Math.max(0, Math.min(count - 1, Math.floor((at - from) / length * count)));
  const positions = (what, first, count, end) => {
    const last = Math.min(first + count, end) - 1;
    const words = what === 'slot' ? '' : tokens.slice(first, last + 1).map(token => ' "' + token + '"').join('');
    return (last === first ? what + ' ' + first : several[what] + ' ' + first + ' to ' + last) + words;
  };
  const tell = event => {
    const box = area.getBoundingClientRect();
    const row = within(event.clientY, box.top, box.height, rows);
    const column = within(event.clientX, box.left, box.width, columns);
    const at = 2 * (row * columns + column);
    const code = 64 * digits.indexOf(weights[at]) + digits.indexOf(weights[at + 1]) - 2048;
    const weight = Number((Math.sign(code) * (code / 2047) ** 2 * full).toPrecision(2));
    const mean = high * wide === 1 ? 'weight ' : 'mean weight ';
    const text = [name, positions('query', row * high, high, queries), positions(kind, column * wide, wide, keys),
      full ? mean + weight : code ? 'visible' : 'not visible'].join('\n');
    area.dataset.tip = text;
    for (const title of area.querySelectorAll('title')) title.textContent = text;
  };
  area.addEventListener('pointermove', tell);
  area.addEventListener('click', tell);
}
