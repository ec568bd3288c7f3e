// The script of the pages where mdBook comes without its own, as Debian's does (scripts/docs/book): themes, copying of commands, keys for the next page, colours of code.
'use strict';

(() => {
  const byId = (id) => document.getElementById(id);
  const [toggle, list] = [byId('theme-toggle'), byId('theme-list')];
  const themes = [...list.querySelectorAll('.theme')].map((button) => button.id).filter((id) => id !== 'default_theme');
  const dark = ['navy', 'coal', 'ayu'];
  const system = matchMedia('(prefers-color-scheme: dark)');
  const stored = () => { try { return localStorage.getItem('mdbook-theme'); } catch { return null; } };

  const show = () => {
    const theme = stored() ?? (system.matches ? default_dark_theme : default_light_theme);
    document.documentElement.classList.remove(...themes);
    document.documentElement.classList.add(theme);
    byId('highlight-css').disabled = dark.includes(theme);
    byId('tomorrow-night-css').disabled = !['navy', 'coal'].includes(theme);
    byId('ayu-highlight-css').disabled = theme !== 'ayu';
    for (const button of list.querySelectorAll('.theme')) {
      button.classList.toggle('theme-selected', button.id === (stored() ?? 'default_theme'));
    }
  };
  const open = (is) => {
    list.style.display = is ? 'block' : 'none';
    toggle.setAttribute('aria-expanded', String(is));
    if (is) list.querySelector('.theme-selected')?.focus();
  };

  toggle.addEventListener('click', () => open(list.style.display !== 'block'));
  list.addEventListener('click', (event) => {
    const button = event.target.closest('.theme');
    if (!button) return;
    try {
      if (button.id === 'default_theme') localStorage.removeItem('mdbook-theme');
      else localStorage.setItem('mdbook-theme', button.id);
    } catch { /* The choice holds for this page alone. */ }
    show();
    open(false);
  });
  document.addEventListener('click', (event) => {
    if (!event.target.closest('#theme-toggle, #theme-list')) open(false);
  });
  system.addEventListener('change', show);
  show();

  const sidebar = byId('sidebar-toggle-anchor');
  sidebar.addEventListener('change', () => {
    const name = sidebar.checked ? 'visible' : 'hidden';
    document.documentElement.classList.remove('sidebar-visible', 'sidebar-hidden');
    document.documentElement.classList.add(`sidebar-${name}`);
    try { localStorage.setItem('mdbook-sidebar', name); } catch { /* The next page shows it as before. */ }
  });

  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') open(false);
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.closest('input, textarea')) return;
    const way = { ArrowLeft: 'prev', ArrowRight: 'next' }[event.key];
    if (way) document.querySelector(`a[rel~="${way}"]`)?.click();
  });

  for (const code of document.querySelectorAll('pre > code')) {
    if (/\blanguage-(?!text)/.test(code.className)) hljs.highlightElement?.(code) ?? hljs.highlightBlock?.(code);
    // What stays here, on a page that was opened as a file, is selected by hand.
    if (!navigator.clipboard) continue;
    const [buttons, copy] = [document.createElement('div'), document.createElement('button')];
    buttons.className = 'buttons';
    Object.assign(copy, { className: 'fa fa-copy clip-button', title: 'Copy', type: 'button' });
    copy.setAttribute('aria-label', 'Copy');
    copy.addEventListener('click', async () => {
      await navigator.clipboard.writeText(code.innerText.trimEnd() + '\n');
      copy.classList.replace('fa-copy', 'fa-check');
      setTimeout(() => copy.classList.replace('fa-check', 'fa-copy'), 1500);
    });
    buttons.append(copy);
    code.before(buttons);
  }
})();
