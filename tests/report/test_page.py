"""The page in a browser: it asks for nothing, says nothing, and every control does what it says."""

import re

import pytest

from jaxmem._units import format_bytes, format_share
from tests.report import samples
from tests.report.conftest import drawn

pytestmark = pytest.mark.once

HOSTILE = (
    "<script>window.hacked = 1</script>"
    """<img src=x onerror="window.hacked = 2">"'`</script>${7*7}{{7*7}}%{x} é漢🙂\u2028"""
)


@pytest.fixture(scope="module")
def page(opened):
    return opened(samples.gpt_report(scanned=True, ops=12))


@pytest.fixture(autouse=True)
def silent(request):
    """Whatever a test does on the shared page, the page neither complains nor asks for anything."""
    yield
    if "page" in request.fixturenames:
        assert request.getfixturevalue("page").said == []


def until(page, condition):
    """Waits for a condition in the page; Playwright's own way needs eval, which the page forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"not within 10 seconds: {condition}")


def hover(page, chart, x, y):
    """The text of the hover label at a place of a chart, given as shares of its size."""
    page.locator(chart).scroll_into_view_if_needed()
    box = page.locator(chart).bounding_box()
    page.mouse.move(box["x"] + x * box["width"] - 3, box["y"] + y * box["height"])
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=3)
    label = page.locator(f"{chart} .hoverlayer .hovertext")
    label.first.wait_for(timeout=10_000)
    return " ".join(label.all_text_contents())


def test_hovering_the_timeline_tells_what_runs(page):
    text = hover(page, "#timeline-chart", 0.3, 0.7)
    assert re.search(r"[\d.]+ [GM]iB alive at \d+", text)
    assert "GPT/blocks" in text and "gpt.py:" in text and "bf16[" in text
    assert any(op in text for op in ("dot_general", "add", "exp", "transpose", "convert_element_type", "reduce_sum"))


def test_hovering_the_map_tells_which_buffer_lies_there(page):
    text = hover(page, "#map-chart", 0.5, 0.79)  # the arguments, alive throughout
    assert re.search(r"MiB (parameters|optimizer state)", text) and "alive 0–" in text and "f32[12,768" in text


def test_hovering_a_layer_tells_its_share(page):
    text = hover(page, "#layers-chart", 0.1, 0.5)
    assert "GPT" in text and "100%" in text


def test_dragging_zooms_and_a_double_click_shows_all(page):
    chart = page.locator("#timeline-chart")
    chart.scroll_into_view_if_needed()
    span = "(() => { const [a, b] = document.getElementById('timeline-chart').layout.xaxis.range; return b - a })()"
    whole = page.evaluate(span)
    box = chart.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.4 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], y, steps=4)
    page.mouse.up()
    until(page, f"{span} < {whole / 5}")
    for _ in range(5):  # on a busy machine two clicks may be too far apart to be one double click
        page.mouse.dblclick(box["x"] + 0.7 * box["width"], y)
        page.wait_for_timeout(1000)
        if page.evaluate(f"{span} === {whole}"):
            break
    until(page, f"{span} === {whole}")


def test_no_button_sends_the_data_anywhere(page):
    """Plotly's own choice of buttons has one that does."""
    buttons = page.locator(".modebar-btn").evaluate_all("buttons => buttons.map((b) => b.dataset.title)")
    assert set(buttons) == {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}


def test_loops_are_drawn_with_their_trips(page):
    notes = page.locator("#timeline-chart .annotation-text").all_text_contents()
    assert notes.count("× 12") == 2 and any(note.startswith("peak ") for note in notes)


def first_cells(page, field):
    return page.locator(f"#buffers tbody td[data-field={field}]").all_text_contents()


def test_sorting_with_mouse_and_keyboard(page):
    heading = page.locator("#buffers th", has_text="bytes")
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    largest = first_cells(page, "size_bytes")
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    smallest = first_cells(page, "size_bytes")
    assert "GiB" in largest[0] and "GiB" not in smallest[0] and largest != smallest
    layer = page.locator("#buffers th", has_text="layer")
    layer.locator("button").click()
    assert heading.get_attribute("aria-sort") == "none"
    names = first_cells(page, "layer")
    assert names == sorted(names)


def test_searching_and_choosing_a_kind(page):
    search = page.locator("#buffers-search")
    search.fill("blocks/mlp parameters")
    count = page.locator("#buffers-count")
    assert re.match(r"1–2 of 2, ", count.text_content())
    search.fill("nowhere")
    assert count.text_content() == "No buffer matches."
    search.fill("")
    page.locator("#buffers-kind").select_option("optimizer_state")
    assert set(first_cells(page, "kind")) == {"optimizer state"}
    page.locator("#buffers-kind").select_option("")


def test_a_buffer_opens_to_all_that_is_known(page):
    page.locator("#buffers-search").fill("scores")
    page.locator("#buffers tbody button").first.click()
    text = page.locator("#buffers tr.more").text_content()
    assert "GPT/blocks/attn/scores/dot_general" in text and "/home/me/project/gpt.py" in text and "T(8,128)" in text
    page.locator("#buffers tbody button").first.click()
    assert page.locator("#buffers tr.more").count() == 0
    page.locator("#buffers-search").fill("")


CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const between = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const ground = page.colour("--surface");
  const names = ["--text", "--muted", "--accent", "--good", "--bad", "--unsure"];
  const words = names.map((name) => between(page.colour(name), ground));
  const hex = (text) => `rgb(${text.slice(1).match(/../g).map((pair) => parseInt(pair, 16))})`;
  const layers = [..."012345678", "other", "none"].map((name) => `layer-${name}`);
  const phases = ["forward", "backward", "recompute", "update", "throughout", "none"].map((name) => `phase-${name}`);
  const grounds = [...layers, ...phases].map((name) => page.colour("--kind", name));
  const inside = grounds.map((colour) => between(hex(page.readable(colour)), colour));
  return [...words, ...inside];
}"""


def test_dark_and_light_both_have_contrast_and_charts_follow(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    fill = "getComputedStyle(document.querySelector('#timeline-chart .xtick text')).fill"
    light = page.evaluate(ground), page.evaluate(fill)
    assert min(page.evaluate(CONTRAST)) >= 4.5
    page.emulate_media(color_scheme="dark")
    until(page, f"{ground} !== '{light[0]}'")
    drawn(page)
    assert page.evaluate(fill) != light[1]
    assert min(page.evaluate(CONTRAST)) >= 4.5
    page.locator("#theme").click()
    drawn(page)
    assert (page.evaluate(ground), page.evaluate(fill)) == light
    page.emulate_media(color_scheme="light")


def test_layers_as_a_treemap(page):
    page.locator("#layers-shape").select_option("treemap")
    until(page, "document.getElementById('layers-chart').data[0].type === 'treemap'")
    page.locator("#layers-shape").select_option("icicle")


HEIGHTS = """() => {
  const traces = document.getElementById("timeline-chart").data;
  const total = traces.at(-1).y;
  const sums = total.map((_, i) => traces.slice(0, -1).reduce((sum, trace) => sum + trace.y[i], 0));
  return Math.max(...total.map((height, i) => Math.abs(height - sums[i]) / Math.max(...total)));
}"""


def test_one_choice_colours_timeline_map_layers_and_tables(page):
    legends = {}
    assert page.locator("#colour").input_value() == "layer"  # since most of this program's bytes are activations
    for colour, marked in (("layer", "layer"), ("phase", "phase"), ("kind", "kind")):
        page.locator("#colour").select_option(colour)
        drawn(page)
        legends[colour] = {
            section: page.locator(f"#{section} .legend li").all_text_contents()
            for section in ("layers", "timeline", "map")
        }
        assert page.locator("#buffers tbody tr").first.locator("td:has(.swatch)").get_attribute("data-field") == marked
        assert page.evaluate(HEIGHTS) < 1e-9  # whatever the groups, they sum to what is alive
    by_layer, by_phase = legends["layer"], legends["phase"]
    assert "GPT/blocks/mlp/in" in by_layer["timeline"] and set(by_layer["map"]) <= set(by_layer["timeline"])
    assert by_phase["timeline"] == ["arguments and outputs", "forward", "backward"] == by_phase["map"]
    assert "activations" in legends["kind"]["timeline"] and "outside any layer" not in legends["kind"]["layers"]


def test_forward_and_backward_are_marked_below_both_charts(page):
    for chart in ("timeline", "map"):
        shapes = f"document.getElementById('{chart}-chart').layout.shapes"
        runs = page.evaluate(f"{shapes}.filter((s) => s.yref === 'paper' && s.type === 'rect' && s.y1 < 0.1)")
        assert [run["name"] for run in runs] == ["forward", "backward"]
        assert runs[0]["x0"] == 0 and runs[0]["x1"] == runs[1]["x0"]
        words = page.locator(f"#{chart}-chart .annotation-text").all_text_contents()
        assert {"forward", "backward"} <= set(words)


def test_a_click_on_the_timeline_lists_what_is_alive(page):
    chart = page.locator("#timeline-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.6 * box["height"], steps=3)
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.6 * box["height"])
    until(page, "document.querySelectorAll('#alive tbody tr').length > 2")
    said = page.locator("#alive-said").text_content()
    place = int(re.search(r"alive at (\d+)", said)[1])
    report = samples.gpt_report(scanned=True, ops=12)
    moment = max((m for m in report.timeline.moments if m.position <= place), key=lambda m: m.position)
    rows = page.locator("#alive tbody tr").all_text_contents()
    assert rows[-1] == f"together{format_bytes(moment.live_bytes)}" and said.startswith(format_bytes(moment.live_bytes))
    more, smaller = re.fullmatch(r"and (\d+) smaller(.*)", rows[-2]).groups()
    known = [*report.timeline.buffers, *(b for b in report.buffers if b.op == "parameter")]
    alive = {b.name: b.size_bytes for b in known if b.start <= moment.position <= b.end and b.size_bytes}
    assert int(more) == len(alive) - 12 and len(rows) == 14
    assert smaller == format_bytes(sum(sorted(alive.values())[:-12]))
    page.locator("#alive-at").fill("")  # by keyboard, too
    page.locator("#alive-at").press("Enter")
    assert page.locator("#alive tbody").is_hidden()
    page.locator("#alive-peak").press("Enter")
    assert int(page.locator("#alive-at").input_value()) == report.timeline.peak_position
    page.locator("#alive tbody button").first.press("Enter")
    assert page.locator("#buffers tr[aria-current=true]").count() == 1


def test_a_click_on_the_map_selects_its_buffer(page):
    page.locator("#buffers-search").fill("nowhere")
    text = hover(page, "#map-chart", 0.5, 0.79)
    page.mouse.down()
    page.mouse.up()
    marked = page.locator("#buffers tr[aria-current=true]")
    marked.wait_for(timeout=10_000)
    cells = marked.locator("td").all_text_contents()
    assert cells[1] in text and cells[2] in text and page.locator("#buffers-search").input_value() == ""
    assert "lies at" in page.locator("#buffers tr.more").text_content()
    until(page, "document.activeElement.closest('tr')?.getAttribute('aria-current') === 'true'")
    place = "document.querySelector('#buffers tr[aria-current=true]').getBoundingClientRect()"
    until(page, f"{place}.top > 0 && {place}.bottom < innerHeight")  # it scrolls smoothly
    until(page, "document.getElementById('map-chart').layout.shapes.some((s) => s.name === 'selected')")


def test_the_table_of_layers_sums_to_the_peak(page):
    report = samples.gpt_report(scanned=True, ops=12)
    table = page.locator("#layers table")
    rows = {row[0]: row[1:] for row in (r.split("|") for r in table.evaluate(ROWS))}
    assert rows["peak"][0] == format_bytes(report.peak_bytes)
    mlp = sum(row.size_bytes for row in report.by_layer if row.layer == "GPT/blocks/mlp/in")
    assert rows["GPT/blocks/mlp/in"][0] == format_bytes(mlp)
    table.locator("th", has_text="layer").locator("button").click()
    names = [r.split("|")[0] for r in table.evaluate(ROWS)][:-2]  # the last two are no layers
    assert names == sorted(names)


ROWS = "table => [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent).join('|'))"


def test_source_lines_stand_beside_their_names(page):
    page.locator("#buffers-search").fill("gpt.py:88")
    code = page.locator("#buffers td[data-field=source] code").first.text_content()
    assert code == "logits = self.head(x)"
    assert "logits = self.head(x)" in page.locator("#buffers tbody").text_content()
    page.locator("#buffers-search").fill("")


def test_a_number_reads_as_python_writes_it(page):
    sizes = [0, 1023, 1024, 1280, 1075, 1331, 3 << 20, 1048575, 1310720, (1 << 30) + 5368709, 27917287424, 5 << 40]
    assert page.evaluate(f"{sizes}.map(page.bytes)") == [format_bytes(size) for size in sizes]
    parts = [0, 1, 4, 5, 15, 25, 35, 125, 499, 995, 1000]
    shares = [format_share(part, 1000) for part in parts]
    assert page.evaluate(f"{parts}.map((part) => page.share(part, 1000))") == shares


def test_it_prints(page):
    page.pdf()  # draws in light colours before, and back after
    drawn(page)


def test_names_of_the_program_stay_text(opened):
    report = samples.renamed(samples.gpt_report(), HOSTILE)
    page = opened(report, against=samples.renamed(samples.gpt_report(scale=0.5), HOSTILE))
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img").count() == 0
    assert HOSTILE.split("\u2028")[0] in page.locator("h1").text_content()
    assert "<script>window.hacked = 1</script>" in hover(page, "#timeline-chart", 0.3, 0.7)
    hover(page, "#map-chart", 0.5, 0.79)
    hover(page, "#layers-chart", 0.1, 0.5)
    page.locator("#buffers tbody button").first.click()
    assert '<img src=x onerror="window.hacked = 2">' in page.locator("#buffers tr.more").text_content()
    assert page.evaluate("window.hacked") is None and page.said == []


def test_comparison_sorts_and_shows_the_details_of_each_variant(opened):
    page = opened(samples.comparison())
    table = page.locator("#comparison table").first
    table.locator("th", has_text="peak").locator("button").click()
    assert table.locator("tbody th").all_text_contents()[0] == "none"
    assert "dots_no_batch" in page.locator("#frontier-chart").text_content()
    page.locator("#frontier-chart .points path").first.hover(force=True)
    text = page.locator("#frontier-chart .hovertext").first.text_content()
    assert "none" in text and "peak 6" in text
    page.locator("#price").select_option("step_seconds")
    before = page.locator("#buffers-count").text_content()
    page.locator("#which").select_option("4")
    drawn(page)
    assert page.locator("#buffers-count").text_content() != before
    assert page.locator("#peak .big:visible").text_content().startswith("2.09 GiB")
    assert page.said == []


def test_a_page_about_nearly_nothing(opened):
    page = opened(samples.bare_report())
    assert page.locator("#timeline [data-none]").is_visible() and page.locator("#map [data-none]").is_visible()
    assert page.locator("#buffers-count").text_content() == "No buffer matches."


def test_a_hundred_layers_on_a_phone(opened):
    report = samples.stretched(samples.gpt_report())
    page = opened(report, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # Of 15,000 moments few are drawn, and the one moment of the peak is among them.
    drawn_moments = page.evaluate("document.getElementById('timeline-chart').data.at(-1).y.length")
    assert drawn_moments < 1000
    assert "peak 93.13 GiB" in page.locator("#timeline-chart").text_content()
    assert page.evaluate("Math.max(...document.getElementById('timeline-chart').data.at(-1).y)") == pytest.approx(
        93.13, abs=0.01
    )
    seconds = page.evaluate("""() => {
      const start = performance.now();
      document.querySelector("#buffers th button").click();
      const search = document.getElementById("buffers-search");
      search.value = "block_7/ fwd";
      search.dispatchEvent(new Event("input"));
      return (performance.now() - start) / 1000;
    }""")
    assert seconds < 1
    row = page.locator("#layers table tbody th button", has_text="GPT/block_*/").first
    count = page.locator("#layers table tbody tr").count()
    row.click()
    assert page.locator("#layers table tr.member").count() == page.locator("#layers table tbody tr").count() - count
