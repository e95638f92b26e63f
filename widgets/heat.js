// Heat maps on a canvas: numbers as squares of one colour, or of two around zero. Knows numbers only.

const POSITIVE = [213, 94, 0]; // orange
const NEGATIVE = [0, 114, 178]; // blue

export function rgbOf(colour) {
  const number = parseInt(colour.slice(1, 7), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

/** 0 … 1 as a colour's strength over whatever lies below: rgba. */
export const strength = (colour) => {
  const [red, green, blue] = rgbOf(colour);
  return (value) => [red, green, blue, 255 * Math.min(1, Math.max(0, value))];
};

/** −1 … 1 as blue … nothing … orange, as strong as its root: a few large values leave the others to be seen. */
export function signedRoot(value) {
  const colour = value < 0 ? NEGATIVE : POSITIVE;
  return [...colour, 255 * Math.min(1, Math.sqrt(Math.abs(value)))];
}

const LEVELS = 255; // as many strengths as a pixel can have, on either side of zero

/** The colours of −1 … 1 as whole pixels: calling colourOf for each of them would be most of the time. */
function pixelsOf(colourOf) {
  const bytes = new Uint8ClampedArray(4 * (2 * LEVELS + 1));
  for (let level = -LEVELS; level <= LEVELS; level++) bytes.set(colourOf(level / LEVELS), 4 * (level + LEVELS));
  return new Uint32Array(bytes.buffer);
}

/** Paint rows × columns values into a rectangle. valueAt(row, column) -> number; colourOf(number) -> rgba. */
export function paintHeat(context, box, rows, columns, valueAt, colourOf) {
  if (!rows || !columns) return;
  const image = new ImageData(columns, rows);
  const [pixels, target] = [pixelsOf(colourOf), new Uint32Array(image.data.buffer)];
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++) {
      const value = Math.max(-1, Math.min(1, valueAt(row, column)));
      target[row * columns + column] = pixels[Math.round(value * LEVELS) + LEVELS];
    }
  const small = document.createElement("canvas");
  Object.assign(small, { width: columns, height: rows });
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = columns > box.width || rows > box.height;
  context.drawImage(small, box.x, box.y, box.width, box.height);
}

/** A thin frame around a rectangle. */
export function frameBox(context, { x, y, width, height }, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
}

/** A <select> whose options follow the data. set([[value, label], …], chosen) changes it only if needed. */
export function makeSelect(h, label, onchange) {
  const select = h("select", { "aria-label": label, onchange: () => onchange(select.value) });
  const el = h("label", { class: "allm-choice" }, `${label} `, select);
  let drawn = "";
  return {
    el, select,
    set(options, chosen) {
      const text = JSON.stringify(options);
      if (text !== drawn && document.activeElement !== select) {
        drawn = text;
        select.replaceChildren(...options.map(([value, name]) => h("option", { value }, name)));
      }
      if (document.activeElement !== select) select.value = String(chosen);
    },
  };
}
