"""What a page must keep for everybody, as JavaScript for a browser to answer: an empty list is right."""

# Controls without a name: a text of their own, a label with words, or `aria-label`.
UNNAMED = """() => [...document.querySelectorAll("button, input, select, canvas")].filter((e) => {
    const labels = [...(e.labels || [])].map((label) => label.cloneNode(true));
    for (const label of labels) label.querySelectorAll("select, input").forEach((control) => control.remove());
    const own = e.tagName === "BUTTON" ? e.textContent : "";
    return e.getClientRects().length && ![own, e.ariaLabel, ...labels.map((label) => label.textContent)].some((text) => text?.trim());
}).map((e) => e.id || e.outerHTML)"""  # noqa: E501
# Of each piece of text: its colour against the nearest opaque ground behind it, by WCAG's formula.
FAINT = """() => {
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                           return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const ground = (e) => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0.9) return c; }
                            return matchMedia("(prefers-color-scheme: dark)").matches ? [20, 20, 20] : [255, 255, 255]; };
    const faint = [];
    for (const e of document.querySelectorAll("body *")) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || !e.getClientRects().length || e.closest(".hidden, script, style, :disabled")) continue;
        const [a, b] = [light(parts(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(`${e.id || e.className || e.tagName}: ${e.textContent.trim().slice(0, 20)}`);
    }
    return faint;
}"""  # noqa: E501
