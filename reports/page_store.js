// The embedded figures. A grid holds every tensor's (and GEMM's) figures over buckets of sampled steps.

const DATA = JSON.parse(document.getElementById("data").textContent);

// Packed text to numbers: three bytes each, the upper ones of a float32 (see fp8dbg/render/cube.py).
function unpack(text) {
  const bytes = atob(text);
  const bits = new Uint32Array(bytes.length / 3);
  for (let i = 0, j = 0; i < bits.length; i += 1, j += 3) {
    bits[i] = (bytes.charCodeAt(j) << 8) | (bytes.charCodeAt(j + 1) << 16) | (bytes.charCodeAt(j + 2) << 24);
  }
  return new Float32Array(bits.buffer);
}

// Figures that follow from rel_l2 and the floor of the formats.
const DERIVED = {
  sqnr_db: (error) => -20 * Math.log10(error),
  excess_db: (error, floor) => (floor === null ? NaN : 20 * Math.log10(error / floor)),
};

class Cube {
  constructor(plain, width) {
    this.layer = plain.layer;
    this.keys = plain.keys;
    this.kind = plain.keys.gemm ? "gemm" : "tensor";
    this.width = width;
    this.packed = plain.columns;
    this.columns = new Map();
    this.place = new Map(plain.layer.map((layer, i) => [`${layer} ${plain.keys[this.kind][i]}`, i]));
    this.names = Object.keys(this.packed).concat("rel_l2" in this.packed ? Object.keys(DERIVED) : []);
  }

  row(layer, name) {
    return this.place.get(`${layer} ${name}`);
  }

  has(column) {
    return this.names.includes(column);
  }

  // One figure of one tensor, a value per bucket; NaN where there is none.
  values(row, column) {
    if (!(column in this.packed)) {
      const floor = this.keys.floor[row];
      return this.values(row, "rel_l2").map((error) => (error > 0 ? DERIVED[column](error, floor) : NaN));
    }
    if (!this.columns.has(column)) this.columns.set(column, this.unpacked(this.packed[column]));
    const { values, rows } = this.columns.get(column);
    const at = rows ? rows.get(row) : row;
    if (at === undefined) return new Float32Array(this.width).fill(NaN);
    return values.subarray(at * this.width, (at + 1) * this.width);
  }

  unpacked({ rows, packed, same }) {
    const count = (rows || this.layer).length;
    const values = packed === undefined ? new Float32Array(count * this.width).fill(same) : unpack(packed);
    return { values, rows: rows && new Map(rows.map((row, at) => [row, at])) };
  }
}

class Grid {
  constructor(plain) {
    this.buckets = plain.buckets; // [first step, last step, sampled steps in it]
    this.tensor = new Cube(plain.tensor, this.buckets.length);
    this.gemm = new Cube(plain.gemm, this.buckets.length);
    this.labels = this.buckets.map(([first, last]) => (first === last ? `${first}` : `${first} to ${last}`));
    this.thinned = Math.max(1, ...this.buckets.map((bucket) => bucket[2]));
  }

  // Which bucket a step falls in: the last that begins at or before it.
  bucketOf(step) {
    let found = 0;
    this.buckets.forEach(([first], i) => {
      if (first <= step) found = i;
    });
    return found;
  }
}

const GRIDS = DATA.grids.map((plain) => new Grid(plain)); // [all tensors, the named layers more finely]
const EVERY = new Grid({ ...DATA.every, gemm: { layer: [], keys: { gemm: [] }, columns: {} } }); // amax and scale, every step
const RANKS = DATA.ranks && new Cube(DATA.ranks, DATA.ranks.keys.ranks.length);
const ROLES = ["input", "weight", "grad_output", "output", "grad_input", "grad_weight"];
const GEMMS = ["fprop", "dgrad", "wgrad"];

// The finest grid that holds a tensor or GEMM.
function gridOf(kind, layer, name) {
  const finest = [...GRIDS].reverse().find((grid) => grid[kind].row(layer, name) !== undefined);
  return finest || GRIDS[0];
}

// The same tensor's figures at every step, as columns of their own.
function addEvery(columns, layer, name) {
  const row = EVERY.tensor.row(layer, name);
  if (row === undefined) return;
  columns.every_step = EVERY.buckets.map((bucket) => bucket[0]);
  EVERY.tensor.names.forEach((column) => {
    const values = EVERY.tensor.values(row, column);
    if (values.some((value) => !Number.isNaN(value))) columns[`${column}_every`] = values;
  });
}

// Columns of one tensor or GEMM for a line chart: name -> array, with step, and the floors as constant columns.
function seriesOf(kind, layer, name) {
  const grid = gridOf(kind, layer, name);
  const cube = grid[kind];
  const row = cube.row(layer, name);
  const columns = { step: grid.buckets.map((bucket) => bucket[0]) };
  if (row === undefined) return { grid, columns };
  cube.names.forEach((column) => {
    const values = cube.values(row, column);
    if (values.some((value) => !Number.isNaN(value))) columns[column] = values;
  });
  if (kind === "tensor") addEvery(columns, layer, name);
  const floor = cube.keys.floor[row];
  if (floor !== null) {
    columns.floor = columns.step.map(() => floor);
    columns.floor_db = columns.step.map(() => DERIVED.sqnr_db(floor));
  }
  return { grid, columns };
}

// The histogram of a tensor at the recorded step nearest to the one asked for; null if there is none.
function histogramOf(layer, tensor, step) {
  const found = [];
  DATA.histograms.forEach(({ step: at, of }) => {
    const entry = of.find((one) => one[0] === layer && one[1] === tensor);
    if (entry) found.push({ step: at, exponent: entry[2], counts: entry[3], numel: entry[4], range: entry[5] });
  });
  if (!found.length) return null;
  const far = (one) => (step === null ? -one.step : Math.abs(one.step - step));
  return { ...found.reduce((best, one) => (far(one) < far(best) ? one : best)), steps: found.map((one) => one.step) };
}
