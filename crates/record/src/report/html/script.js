'use strict';
const byId = name => document.getElementById(name);
const rows = [...document.querySelectorAll('tbody tr')];

// Filter: a row stays if it, its caption or its section's heading has every word.
const text = new Map(rows.map(row => {
  const place = row.closest('section').querySelector('h2').textContent + ' ' + row.closest('table').caption.textContent;
  return [row, (row.textContent + ' ' + [...row.cells].map(c => c.textContent).join(' ') + ' ' + place).toLowerCase()];
}));
const filter = () => {
  const words = byId('filter').value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const row of rows) {
    row.hidden = !words.every(word => text.get(row).includes(word));
    found += row.hidden ? 0 : 1;
  }
  for (const box of document.querySelectorAll('.scroll'))
    box.hidden = words.length > 0 && ![...box.querySelectorAll('tbody tr')].some(row => !row.hidden);
  byId('found').textContent = words.length ? found + ' of ' + rows.length + ' rows' : '';
};
byId('filter').addEventListener('input', filter);
filter();

// Sorting: by the first number of a cell with its unit, else by its text; a third press restores the order.
const units = { 'µs': 1e-6, ms: 1e-3, s: 1, B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824, TiB: 1099511627776 };
const value = cell => {
  const match = cell.textContent.replace(/[≤>~]/g, '').trim().match(/^([-+]?\d[\d.]*(?:e[-+]?\d+)?)\s*([^\s\d±(]*)/);
  return match ? parseFloat(match[1]) * (units[match[2]] || 1) : null;
};
for (const table of document.querySelectorAll('table')) {
  const first = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector('button').addEventListener('click', () => {
    const next = { ascending: 'descending', descending: null }[head.getAttribute('aria-sort')];
    const order = next === undefined ? 'ascending' : next;
    heads.forEach(other => other.removeAttribute('aria-sort'));
    const sorted = [...first];
    if (order) {
      head.setAttribute('aria-sort', order);
      const sign = order === 'ascending' ? 1 : -1;
      sorted.sort((a, b) => {
        const [x, y] = [a.cells[column], b.cells[column]];
        const [p, q] = [value(x), value(y)];
        if (p !== null && q !== null) return sign * (p - q);
        if (p !== null || q !== null) return p !== null ? -1 : 1; // what has no number stands last
        return sign * x.textContent.localeCompare(y.textContent);
      });
    }
    table.tBodies[0].append(...sorted);
  }));
}

// Under the pointer: value and interval of a point.
const tip = byId('tip');
for (const title of document.querySelectorAll('.tips title')) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
const show = event => {
  const point = event.target.closest('[data-tip]');
  if (!point) { tip.hidden = true; return; }
  tip.textContent = point.dataset.tip;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4)) + 'px';
  tip.style.top = Math.max(4, event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16) + 'px';
};
document.addEventListener('pointermove', event => { if (event.pointerType === 'mouse') show(event); });
document.addEventListener('click', show);
document.addEventListener('scroll', () => { tip.hidden = true; }, { passive: true });

// What a link leads to is opened; the contents are open where there is room beside the text.
const open = () => {
  const place = location.hash && document.getElementById(location.hash.slice(1));
  const closed = place && place.closest('details');
  if (closed && !closed.open) { closed.open = true; place.scrollIntoView({ block: 'center' }); }
};
addEventListener('hashchange', open);
open();
byId('contents').open = matchMedia('(min-width: 75rem)').matches;
byId('contents').addEventListener('click', event => {
  if (event.target.closest('a') && !matchMedia('(min-width: 75rem)').matches) byId('contents').open = false;
});

// Light or dark: the system's choice until the button is pressed.
byId('theme').addEventListener('click', () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
});

// Print all of it.
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(one => { one.open = true; }));
