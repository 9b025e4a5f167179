// Search a built site as its own search box does: node docs/tools/search_site.js build/site QUERY...
// Prints one JSON object: for each query the addresses of the pages it finds, best first.
// Runs the theme's worker on the built index, so that boosts, synonyms and stemming are those of the site.
const fs = require("fs"), path = require("path"), vm = require("vm")

const [site, ...queries] = process.argv.slice(2)
const workers = path.join(site, "assets/javascripts/workers")
const worker = fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")))

let ask
const answers = []
globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => { ask = listener }
globalThis.postMessage = message => answers.push(message.data)
vm.runInThisContext(fs.readFileSync(path.join(workers, worker), "utf8"))

const turn = () => new Promise(resolve => setImmediate(resolve))
async function main() {
  ask({ data: { type: 0, data: { config: index.config, docs: index.docs, options: {} } } })
  for (let i = 0; i < 9; i++) await turn()
  const found = {}
  for (const query of queries) {
    answers.length = 0
    ask({ data: { type: 2, data: query } })
    while (!answers.length) await turn()
    found[query] = answers[0].items.map(sections => sections[0].location.split("#")[0])
  }
  console.log(JSON.stringify(found))
}
main()
