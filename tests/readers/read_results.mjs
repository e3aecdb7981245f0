// Read results of ZarrSink in JavaScript, as far as a browser would: every array, its attributes, and a sum of its values.
//
//     npm install zarrita @zarrita/storage
//     node read_results.mjs RESULTS.zarr
//
// Prints one line of JSON, which tests/readers/compare.py holds beside what zarr-python and xarray read.

import { readdirSync } from "node:fs";
import { join, resolve } from "node:path";
import * as zarr from "zarrita";
import { FileSystemStore } from "@zarrita/storage";

const path = resolve(process.argv[2]);
const group = await zarr.open.v2(new FileSystemStore(path), { kind: "group" });
const found = { attrs: group.attrs, arrays: {} };
for (const entry of readdirSync(path, { withFileTypes: true })) {
  if (!entry.isDirectory()) continue;
  const array = await zarr.open.v2(group.resolve(entry.name), { kind: "array" });
  const { data } = await zarr.get(array);
  const values = Array.from(data);
  const isText = typeof values[0] === "string";
  found.arrays[entry.name] = {
    shape: array.shape,
    attrs: array.attrs,
    sum: isText ? values.join("|") : values.reduce((sum, value) => sum + Number(value), 0),
  };
}
console.log(JSON.stringify(found));
